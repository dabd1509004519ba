"""FamilySpec and FamilyManager: any family of kvframe that keeps tokens, as a spec and a manager of vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvframe.checks import cdiv
from kvframe.lifetime import Lifetime
from kvframe.plugins import load_plugins

_SHARED = (
    "block_size",
    "dcp_sharded",
    "block_stride_alignment",
    "max_tp_shards",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "page_size_padded",
    "num_head_slots",
    "state_content_bytes",
    "tokens_per_state",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilySpec(AttentionSpec):  # type: ignore[misc]
    """A kvframe spec as vLLM's. vLLM changes block size and padding of its copies: kvframe's own then follows.

    Args:
        kvframe_spec: the spec, of a family that a plugin brings to kvframe.
    """

    kvframe_spec: Any

    @classmethod
    def of(cls, spec: Any) -> FamilySpec:
        """The spec for vLLM."""
        import torch

        fields = {name: getattr(spec, name) for name in _SHARED}
        return cls(
            **fields,
            dtype=getattr(torch, spec.dtype),
            kv_quant_mode=KVQuantMode(int(spec.kv_quant_mode)),
            kvframe_spec=spec,
        )

    def __post_init__(self) -> None:
        """Carry vLLM's changes over."""
        super().__post_init__()
        spec = self.kvframe_spec
        changed = {
            name: getattr(self, name)
            for name in ("block_size", "page_size_padded")
            if getattr(self, name) != getattr(spec, name)
        }
        if changed:
            object.__setattr__(self, "kvframe_spec", attrs.evolve(spec, **changed))

    def __reduce__(self) -> Any:
        """Specs go from the workers to the engine's process, where the class may not be registered yet."""
        return (_restored, (self.kvframe_spec,))

    @property
    def lifetime(self) -> Lifetime:
        """The family's rule for this spec."""
        return load_plugins().family(self.kvframe_spec).lifetime(self.kvframe_spec)

    @property
    def prefix_cacheable(self) -> bool:
        """Whether later requests find its blocks."""
        return bool(self.kvframe_spec.prefix_cacheable) and self.lifetime.hits == "keyed"

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer's page."""
        return int(self.kvframe_spec.page_size_bytes)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """The most bytes that one request can hold: the peak of the lifetime."""
        limits = (vllm_config.max_in_flight_tokens, vllm_config.model_config.max_model_len)
        return self.lifetime.peak(*limits) * self.page_size_bytes

    def copy_with_new_block_size(self, block_size: int) -> FamilySpec:
        """The same with another block."""
        return FamilySpec.of(self.kvframe_spec.copy_with_new_block_size(block_size))

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        """Whether all these layers need the same blocks."""
        return len({_table_key(spec) for spec in kv_cache_specs.values()}) == 1


def _table_key(spec: Any) -> Any:
    if not isinstance(spec, FamilySpec):
        return type(spec)
    return load_plugins().family(spec.kvframe_spec).table_key(spec.kvframe_spec)


def _restored(spec: Any) -> FamilySpec:
    register()
    return FamilySpec.of(spec)


def register() -> None:
    """Tell vLLM's registry of the class; calling it again changes nothing."""
    # Registering before vLLM's own classes would make it believe that those are there.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(FamilySpec, manager_class=FamilyManager, uniform_type_base_spec=FamilySpec)


class FamilyManager(SingleTypeKVCacheManager):  # type: ignore[misc]
    """vLLM's manager of one group, by the lifetime of its family."""

    def __init__(self, kv_cache_spec: FamilySpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._lifetime = kv_cache_spec.lifetime

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: FamilySpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[Any], ...], int]:
        """The longest prefix, of at most `max_length` tokens, all of whose living blocks are cached."""
        lifetime, block = kv_cache_spec.lifetime, kv_cache_spec.block_size
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block)
        drop = block if drop_eagle_block else 0
        found = [
            block_pool.get_cached_block(hashes[entry], kv_cache_group_ids)
            for entry in range(max_length // block)
        ]
        longest = max(0, max_length - drop) // alignment_tokens * alignment_tokens
        for length in range(longest, 0, -alignment_tokens):
            alive = _alive(lifetime, length, cdiv(length + drop, block))
            if all(found[entry] for entry in alive):
                return _chosen(found, set(alive), cdiv(length, block), block_pool, kv_cache_group_ids), length
        return tuple([] for _ in kv_cache_group_ids), 0

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens at the start that a request with so many tokens, all of a prefix, never reads."""
        low, high = self._lifetime.dead(num_computed_tokens, num_computed_tokens)
        return int(high) * self.block_size if low == 0 < high else 0

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back the blocks that no later step reads."""
        prompt = processed_computed_tokens if num_prompt_tokens is None else num_prompt_tokens
        low, high = self._lifetime.dead(processed_computed_tokens, prompt)
        self._remove_blocks_in_range(request_id, int(low), int(high))


def _alive(lifetime: Lifetime, length: int, stop: int) -> Sequence[int]:
    low, high = (int(edge) for edge in lifetime.dead(length + lifetime.slack, length))
    return [entry for entry in range(stop) if not low <= entry < high]


def _chosen(
    found: Sequence[Any], alive: set[int], count: int, block_pool: Any, groups: Iterable[int]
) -> tuple[list[Any], ...]:
    return tuple(
        [found[entry][place] if entry in alive else block_pool.null_block for entry in range(count)]
        for place, _ in enumerate(groups)
    )
