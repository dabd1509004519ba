"""Chained block hashes: exact for `sha256_cbor`, and the laws of the manager's own function."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe.blocks import ExtraKeys, MultiModalItem, TokenChain
from kvframe.blocks.hashing import block_hash, cbor
from kvframe.errors import SpecError
from tests import vectors

# "sha256" in the vectors is SHA-256 over the reference's Python pickle, which kvframe does not exchange.
CASES = [case for case in vectors.load("hashes") if case["input"]["hash"] == "sha256_cbor"]
CHAINS = [case for case in CASES if "prompt" in case["input"]]


def tokens_of(runs: list[list[int]]) -> list[int]:
    return [token for start, count in runs for token in range(start, start + count)]


def chain_of(words: dict[str, Any]) -> TokenChain:
    extra = ExtraKeys(salt=words.get("salt"), lora_name=words.get("lora_name"))
    chain = TokenChain(
        hash=block_hash("sha256_cbor"),
        unit=words["hash_block_size"],
        lookahead=words.get("lookahead_tokens", 0),
        extra=extra,
    )
    chain.extend(tokens_of(words["prompt"]))
    return chain


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in CHAINS])
def test_chain(case: dict[str, Any]) -> None:
    words = case["input"]
    chain = chain_of(words)
    view = chain.view(words.get("target_block_size", words["hash_block_size"]))
    assert [row.tobytes().hex() for row in view] == case["expect"]["block_hashes"]


def test_the_root_is_the_seeds_hash() -> None:
    for case in CASES:
        if "root" in case["expect"]:
            assert block_hash("sha256_cbor").root.hex() == case["expect"]["root"]


@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=60), st.integers(0, 60), st.integers(1, 7), st.integers(0, 2)
)
def test_a_chain_does_not_depend_on_how_its_tokens_came(
    tokens: list[int], cut: int, unit: int, ahead: int
) -> None:
    for name in ("sha256", "sha256_cbor"):
        whole = TokenChain(hash=block_hash(name), unit=unit, lookahead=ahead, extra=ExtraKeys(salt="s"))
        parts = TokenChain(hash=block_hash(name), unit=unit, lookahead=ahead, extra=ExtraKeys(salt="s"))
        whole.extend(tokens)
        parts.extend(tokens[:cut])
        parts.extend(tokens[cut:])
        assert whole.digests == parts.digests
        assert whole.num_tokens == parts.num_tokens == len(tokens)
        assert whole.num_units == max(0, len(tokens) - ahead) // unit


def test_the_default_is_sha256_over_parent_and_raw_tokens() -> None:
    chain = TokenChain(hash=block_hash("sha256"), unit=2)
    chain.extend([1, 2, 3, 4])
    first = hashlib.sha256(chain.hash.root + np.array([1, 2], np.int32).tobytes()).digest()  # type: ignore[union-attr]
    assert (
        bytes(chain.digests) == first + hashlib.sha256(first + np.array([3, 4], np.int32).tobytes()).digest()
    )


def test_salts_adapters_and_images_tell_requests_apart() -> None:
    keys = [
        ExtraKeys(),
        ExtraKeys(salt="a"),
        ExtraKeys(salt="b"),
        ExtraKeys(lora_name="x"),
        ExtraKeys(items=(MultiModalItem(identifier="i", offset=1, length=2),)),
        ExtraKeys(items=(MultiModalItem(identifier="j", offset=1, length=2),)),
        ExtraKeys(embeds=lambda start, stop: b"e"),
    ]
    for name in ("sha256", "sha256_cbor"):
        seen = set()
        for extra in keys:
            chain = TokenChain(hash=block_hash(name), unit=4, extra=extra)
            chain.extend(range(8))
            seen |= {bytes(chain.digests[:32]), bytes(chain.digests[32:])}
        assert len(seen) == 2 * len(keys)


def test_an_items_place_is_relative_to_the_unit() -> None:
    # contract 6.7: an item at 2..4, units of 4: (…, 2) in the first unit, (…, -2) in the second.
    extra = ExtraKeys(items=(MultiModalItem(identifier="id", offset=2, length=3),))
    assert extra.of_unit(0, 4) == (("mm", "id", 2),)
    assert extra.of_unit(4, 8) == (("mm", "id", -2),)
    assert extra.of_unit(8, 12) is None


def test_cbor_examples_of_the_standard() -> None:
    # RFC 8949, appendix A.
    expected = {
        0: "00",
        23: "17",
        24: "1818",
        255: "18ff",
        256: "190100",
        1000000: "1a000f4240",
        1000000000000: "1b000000e8d4a51000",
        -1: "20",
        -1000: "3903e7",
        "IETF": "6449455446",
        "ü": "62c3bc",
        b"\x01\x02\x03\x04": "4401020304",
        None: "f6",
        (1, (2, 3), (4, 5)): "8301820203820405",
    }
    for value, encoded in expected.items():
        assert cbor(value).hex() == encoded
    for wrong in (1.5, {}, True):
        with pytest.raises(SpecError):
            cbor(wrong)


def test_an_unknown_hash_is_named_with_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean 'sha256_cbor'"):
        block_hash("sha256_cobr")
