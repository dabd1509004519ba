"""Chained block hashes: unit i's hash covers its tokens, its extra keys, and through its parent all that came before.

Tokens are whole numbers below 2^32, hashed as four bytes each. A hash is 32 bytes. The root, parent of the first unit,
is the hash of a fixed seed, so that every process computes the same hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.checks import at_least, name_rule
from kvframe.errors import SpecError

SEED = "vllm-none-hash"  # the seed that engines which exchange hashes have agreed on
DIGEST_BYTES = 32
_AT_ONCE = 128  # units that are bytes objects at a time: twice or half as many take 5 to 10 % longer

Tokens = npt.NDArray[np.uint32]
_INT32, _UINT32 = np.dtype(np.int32), np.dtype(np.uint32)
_NO_TOKENS: Tokens = np.zeros(0, np.uint32)
UnitHash = Callable[[bytes, Tokens, "tuple[Any, ...] | None"], bytes]


def as_tokens(tokens: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Tokens:
    """Token ids as an array; int32 and uint32 arrays are not copied."""
    if isinstance(tokens, np.ndarray) and tokens.dtype == _INT32:
        return tokens.view(_UINT32)
    return np.asarray(tokens, np.uint32)


def _head(major: int, value: int) -> bytes:
    """A CBOR item's first bytes: its major type and the shortest form of its number."""
    if value < 24:
        return bytes((major << 5 | value,))
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << (8 * size):
            return bytes((major << 5 | code,)) + value.to_bytes(size, "big")
    raise SpecError(spec="hash", field="number", value=value, rule="must fit 64 bits")


def cbor(value: Any) -> bytes:
    """The canonical CBOR (RFC 8949, 4.2) of None, bytes, text, whole numbers, and sequences of these.

    Raises:
        SpecError: a value of another type, or a number beyond 64 bits.
    """
    if value is None:
        return b"\xf6"
    if isinstance(value, int) and not isinstance(value, bool):
        return _head(0, value) if value >= 0 else _head(1, -1 - value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _head(3, len(text)) + text
    if isinstance(value, (tuple, list)):
        return _head(4, len(value)) + b"".join(map(cbor, value))
    raise SpecError(
        spec="hash",
        field="extra key",
        value=value,
        rule="must be text, bytes, a whole number, None, or a tuple of these",
    )


def _sha256_raw(parent: bytes, tokens: Tokens, extra: tuple[Any, ...] | None) -> bytes:
    data = parent + tokens.tobytes()
    return hashlib.sha256(data if extra is None else data + cbor(extra)).digest()


def _sha256_cbor(parent: bytes, tokens: Tokens, extra: tuple[Any, ...] | None) -> bytes:
    return hashlib.sha256(cbor((parent, tokens.tolist(), extra))).digest()


@attrs.frozen(kw_only=True)
class BlockHash:
    """A hash function for units of tokens.

    Args:
        name: how configurations ask for it.
        unit: (parent hash, tokens, extra keys or None) to the unit's hash of 32 bytes.
        root: the first unit's parent.
    """

    name: str
    unit: UnitHash
    root: bytes


# The manager's own, over the tokens' raw bytes; and the one that engines exchange.
HASHES: Mapping[str, BlockHash] = MappingProxyType(
    {
        "sha256": BlockHash(name="sha256", unit=_sha256_raw, root=hashlib.sha256(cbor(SEED)).digest()),
        "sha256_cbor": BlockHash(
            name="sha256_cbor", unit=_sha256_cbor, root=hashlib.sha256(cbor(SEED)).digest()
        ),
    }
)


def block_hash(name: str) -> BlockHash:
    """The hash function of a name.

    Raises:
        SpecError: there is none of that name.
    """
    if name in HASHES:
        return HASHES[name]
    raise SpecError(spec="BlockConfig", field="hash_name", value=name, rule=name_rule(name, HASHES))


@attrs.frozen(kw_only=True)
class MultiModalItem:
    """An image, a sound or the like whose placeholder tokens stand for content that only its identifier tells apart.

    Args:
        identifier: the content's own name, for instance its hash.
        offset: position of its first token.
        length: tokens that it takes.
    """

    identifier: str
    offset: int = attrs.field(validator=at_least(0))
    length: int = attrs.field(validator=at_least(1))


@attrs.frozen(kw_only=True)
class ExtraKeys:
    """What beside the tokens decides a block's content (contract 6.7).

    Args:
        salt: the tenant's salt: requests with different salts share nothing.
        lora_name: adapter, part of every unit's hash.
        lora_path: where it was loaded from.
        items: multimodal items, by offset.
        embeds: bytes of the prompt embeddings of a range of positions, where prompts are not tokens.
    """

    salt: str | None = None
    lora_name: str | None = None
    lora_path: str = "none"
    items: tuple[MultiModalItem, ...] = ()
    embeds: Callable[[int, int], bytes] | None = None

    @property
    def plain(self) -> bool:
        """Whether units after the first have no extra keys."""
        return self.lora_name is None and not self.items and self.embeds is None

    def of_unit(self, start: int, stop: int) -> tuple[Any, ...] | None:
        """The extra keys of the positions [start, stop), None if there are none."""
        keys: list[Any] = []
        if self.lora_name is not None:
            keys.append(("lora", self.lora_name, self.lora_path))
        keys += [
            ("mm", item.identifier, item.offset - start)
            for item in self.items
            if item.offset < stop and item.offset + item.length > start
        ]
        if self.salt is not None and start == 0:
            keys.append(("cache_salt", self.salt))
        if self.embeds is not None:
            keys.append(("prompt_embeds", hashlib.sha256(self.embeds(start, stop)).digest()))
        return tuple(keys) or None


NO_EXTRA_KEYS = ExtraKeys()


@attrs.define(kw_only=True)
class TokenChain:
    """The hashes of one request's tokens, extended as tokens come.

    Args:
        hash: the hash function; None: tokens are only counted, without prefix caching.
        unit: tokens of a unit.
        lookahead: tokens beyond a unit that must exist before it is hashed, and that its hash covers.
        extra: the request's extra keys.
        num_tokens: tokens seen.
        digests: the hashes so far, 32 bytes each.
        tail: the tokens that no hash covers as its own yet.
    """

    hash: BlockHash | None
    unit: int
    lookahead: int = 0
    extra: ExtraKeys = NO_EXTRA_KEYS
    num_tokens: int = 0
    digests: bytearray = attrs.field(factory=bytearray)
    tail: Tokens = _NO_TOKENS

    @property
    def num_units(self) -> int:
        """Units hashed."""
        return len(self.digests) // DIGEST_BYTES

    @property
    def parent(self) -> bytes:
        """The parent of the next unit: the last hash, or the root."""
        if self.digests:
            return bytes(self.digests[-DIGEST_BYTES:])
        return b"" if self.hash is None else self.hash.root

    def hash_at(self, tokens: int) -> bytes:
        """The hash of the first `tokens` tokens, a multiple of the unit; empty if there is none yet."""
        end = tokens // self.unit * DIGEST_BYTES
        return bytes(self.digests[end - DIGEST_BYTES : end]) if end else b""

    @property
    def raw(self) -> bool:
        """Whether the next unit's hash covers just its parent and the raw bytes of its tokens."""
        plain = self.extra.plain and (self.extra.salt is None or bool(self.digests))
        return self.hash is not None and self.hash.unit is _sha256_raw and not self.lookahead and plain

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None:
        """Add tokens and hash the units that became full."""
        self.num_tokens += len(tokens)
        if self.hash is None:
            return
        new = as_tokens(tokens)
        data = np.concatenate((self.tail, new)) if len(self.tail) else new
        unit, ahead = self.unit, self.lookahead
        count = max(0, len(data) - ahead) // unit
        parent = self.parent
        if not ahead and self.extra.plain and self.hash.unit is _sha256_raw:
            self._extend_raw(parent, data, count)
        else:
            start = self.num_units * unit
            for at in range(0, count * unit, unit):
                extra = self.extra.of_unit(start + at, start + at + unit + ahead)
                if ahead:
                    extra = (extra, *data[at + unit : at + unit + ahead].tolist())
                parent = self.hash.unit(parent, data[at : at + unit], extra)
                self.digests += parent
        rest = data[count * unit :]
        self.tail = rest.copy() if len(rest) else _NO_TOKENS

    def _extend_raw(self, parent: bytes, data: Tokens, count: int) -> None:
        # The common case as one tight loop: no extra keys but a salt in the first unit's, raw bytes.
        sha256 = hashlib.sha256
        every = np.ascontiguousarray(data[: count * self.unit]).view(f"V{4 * self.unit}")
        salted = self.extra.salt is not None and not self.digests
        first = self.extra.of_unit(0, self.unit) if salted and count else None
        for start in range(0, count, _AT_ONCE):
            units = every[start : start + _AT_ONCE].tolist()
            if first is not None and not start:
                units[0] += cbor(first)
            self.digests += b"".join([parent := sha256(parent + unit).digest() for unit in units])

    def view(self, block: int) -> npt.NDArray[np.uint64]:
        """The hashes at the ends of blocks of `block` tokens, [blocks, 4] words: every (block / unit)-th one."""
        words = np.frombuffer(bytes(self.digests), np.uint64).reshape(-1, 4)
        step = block // self.unit
        return words[step - 1 :: step]
