"""The bytes of a plan: token caches and states of all layers, written and read by block ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from kvframe.blocks import Copy
from kvframe.buffers import allocate
from kvframe.config import KVCacheConfig
from kvframe.errors import UsageError
from kvframe.ops import (
    CellCodec,
    LayerCache,
    TokenMap,
    cell_codec,
    copy_blocks,
    gather_kv,
    layer_cache,
    token_map,
    write_kv,
    zero_blocks,
)
from kvframe.views import create_kv_cache_views, make_views
from kvframe_transformers.planes import Plane, planes
from kvframe_transformers.planning import ModelPlan

if TYPE_CHECKING:
    from kvframe_transformers.forward import Forward

CONV, SSM = "conv", "ssm"


@attrs.define(kw_only=True, eq=False)
class TokenStore:
    """One layer's keys and values.

    Args:
        name: the layer's cache.
        group: index of its group.
        cache: its cells.
        tokens: how tokens lie in blocks.
        joint: key and value are stored as one vector (MLA).
        planes: its keys and values where they can be read in one copy; None: they cannot.
        widths: elements of a key and of a value, known from the first write of a joint cache.
    """

    name: str
    group: int
    cache: LayerCache
    tokens: TokenMap
    joint: bool
    planes: tuple[Plane, Plane] | None
    widths: tuple[int, int] = (0, 0)

    def store(self, forward: Forward, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the new columns of a pass, [batch, heads, new, width]."""
        chosen, slots = forward.write_slots(self.group, self.tokens)
        sides = [flat(side) if chosen is None else flat(side)[chosen] for side in (key, value)]
        if self.planes is None:
            self.write(slots, *sides)
            return
        for plane, side in zip(self.planes, sides, strict=True):
            plane.put(forward.write_index(self.group, self.tokens, plane), side)

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store tokens.

        Args:
            slots: [K], int64.
            key: [K, heads, width].
            value: [K, heads, width of V].
        """
        self.widths = (key.shape[-1], value.shape[-1])
        if self.joint:
            write_kv(self.cache, slots, torch.cat((key, value), -1), None)
        else:
            write_kv(self.cache, slots, key, value)

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of slots [B, T], [B, heads, T, width] each, not contiguous, in the stored precision."""
        key, value = gather_kv(self.cache, slots)
        if self.joint:
            key, value = key[..., : self.widths[0]], key[..., self.widths[0] :]
        return key.transpose(1, 2), value.transpose(1, 2)


@attrs.define(kw_only=True, eq=False)
class StateStore:
    """One layer's recurrent state.

    Args:
        name: the layer's cache.
        group: index of its group.
        pages: its cells, for copies.
        views: "conv" [blocks, columns, channels] and "ssm" [blocks, …], those of them that the layer has.
        columns: of the convolution state as the model sees it, known from the first update.
        dtypes: of the states as the model gave them.
        shape: of a sequence's recurrent state as the model gave it.
    """

    name: str
    group: int
    pages: LayerCache
    views: Mapping[str, torch.Tensor]
    columns: int = 0
    dtypes: dict[str, torch.dtype] = attrs.field(factory=dict)
    shape: tuple[int, ...] = ()

    def write_conv(self, rows: torch.Tensor, blocks: torch.Tensor, state: torch.Tensor) -> None:
        """Store the last inputs [rows, channels, columns] of the convolution; the oldest column may be one too many."""
        view = self._view(CONV)
        self._check(CONV, state, numbers=view.shape[1:].numel() // view.shape[1] * state.shape[-1])
        self.dtypes.setdefault(CONV, state.dtype)
        kept = state[..., -view.shape[1] :].transpose(1, 2)
        view[blocks] = kept[rows].to(view.dtype)

    def read_conv(self, blocks: torch.Tensor) -> torch.Tensor:
        """The convolution state as the model keeps it, [B, channels, columns]; a column that no step reads is zero."""
        view = self._view(CONV)
        found = view[blocks].transpose(1, 2).to(self.dtypes[CONV])
        missing = self.columns - view.shape[1]
        return torch.nn.functional.pad(found, (missing, 0)) if missing > 0 else found.contiguous()

    def write_ssm(self, rows: torch.Tensor, blocks: torch.Tensor, state: torch.Tensor) -> None:
        """Store the recurrent state [rows, …]."""
        view = self._view(SSM)
        self._check(SSM, state, numbers=view.shape[1:].numel())
        self.dtypes.setdefault(SSM, state.dtype)
        self.shape = tuple(state.shape[1:])
        view[blocks] = state[rows].reshape(len(blocks), *view.shape[1:]).to(view.dtype)

    def read_ssm(self, blocks: torch.Tensor) -> torch.Tensor:
        """The recurrent state as the model gave it."""
        found = self._view(SSM)[blocks].to(self.dtypes[SSM])
        return found.reshape(len(blocks), *self.shape)

    def _view(self, state: str) -> torch.Tensor:
        if state not in self.views:
            raise UsageError(option=self.name, value=state, rule=f"keeps only {', '.join(self.views)}")
        return self.views[state]

    def _check(self, name: str, state: torch.Tensor, numbers: int) -> None:
        stored = self.views[name].dtype
        exact = torch.promote_types(stored, state.dtype) is stored
        if state[0].numel() != numbers or not exact:
            rule = (
                f"the model's state of {tuple(state.shape[1:])} {state.dtype} does not fit "
                f"{tuple(self.views[name].shape[1:])} {stored}"
            )
            raise UsageError(option=self.name, value=name, rule=rule)


class Storage:
    """All layers' bytes.

    Args:
        planned: the plan.
        device: of the buffers.
    """

    def __init__(self, planned: ModelPlan, device: str) -> None:
        self.config = config = planned.config
        self.device = torch.device(device)
        self.buffers = {
            name: allocate(planned.host, name, pool.size_bytes, device) for name, pool in config.pools.items()
        }
        raw = {name: buffer.tensor for name, buffer in self.buffers.items()}
        groups = {layer: g for g, group in enumerate(config.groups) for layer in group.layer_specs}
        self._views = make_views(planned.host, config, raw)
        self.tokens: dict[str, TokenStore] = {}
        self.states: dict[str, StateStore] = {}
        self.groups: list[list[LayerCache]] = [[] for _ in config.groups]
        for tensor in config.tensors:
            spec = config.groups[groups[tensor.layers[0]]].layer_specs[tensor.layers[0]]
            layout = planned.host.layouts.get(config.pools[tensor.pool].layout)
            cells = create_kv_cache_views(
                raw[tensor.pool], spec, config.num_blocks_of(tensor), layout, tensor
            )
            for layer, part in zip(tensor.layers, cells, strict=True):
                self._add(layer, groups[layer], spec, part, planned)

    def _add(self, layer: str, group: int, spec: Any, cells: torch.Tensor, planned: ModelPlan) -> None:
        if spec.tokens_per_state < 0:
            pages = layer_cache(cells)
            self.states[layer] = StateStore(name=layer, group=group, pages=pages, views=self._views[layer])
            self.groups[group].append(pages)
            return
        codec: CellCodec = cell_codec(spec, planned.host.cache_dtypes, cache_dtype=_chosen(spec, planned))
        cache = layer_cache(cells, codec)
        self.tokens[layer] = TokenStore(
            name=layer,
            group=group,
            cache=cache,
            tokens=token_map(planned.host, spec),
            joint=spec.head_size_v == 0,
            planes=planes(cache.cells, codec),
        )
        self.groups[group].append(cache)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy blocks, all layers of their groups."""
        for group in {copy.group for copy in copies}:
            pairs = [(copy.source, copy.target) for copy in copies if copy.group == group]
            layers = self.groups[group]
            copy_blocks(layers, layers, torch.tensor(pairs, device=self.device))

    def zero(self, fresh: Sequence[Sequence[int]]) -> None:
        """Zero new blocks, by group."""
        for group, blocks in enumerate(fresh):
            if blocks:
                zero_blocks(self.groups[group], torch.tensor(blocks, device=self.device))

    def index(self, numbers: np.ndarray[Any, Any]) -> torch.Tensor:
        """An integer array as int64 on the buffers' device."""
        return torch.from_numpy(np.ascontiguousarray(numbers, np.int64)).to(self.device)

    def close(self) -> None:
        """Give the memory back; no view may be used any more."""
        self.tokens.clear()
        self.states.clear()
        self.groups.clear()
        self._views = {}
        for buffer in self.buffers.values():
            buffer.close()


def flat(states: torch.Tensor) -> torch.Tensor:
    """[batch, heads, new, width] as [batch * new, heads, width]."""
    return states.transpose(1, 2).flatten(0, 1)


def _chosen(spec: Any, planned: ModelPlan) -> Any:
    """The operator's cache dtype, where the layer is stored so."""
    chosen = planned.cache_dtype
    return chosen if chosen.is_quantized and chosen.mode is spec.kv_quant_mode else None


def block_bytes(config: KVCacheConfig) -> tuple[int, ...]:
    """Bytes that one block of each group takes from its pool, over all layers."""
    return tuple(config.block_bytes_of(group) for group in config.groups)
