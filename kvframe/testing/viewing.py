"""Small plans of one family in every layout, with their buffers and views: what the checks of views look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.address import addresses
from kvframe.checks import round_up
from kvframe.config import DEVICE, KVCacheConfig, KVCacheTensor
from kvframe.errors import LayoutError, PlanError, SpecError
from kvframe.layout import KVCacheLayout
from kvframe.planning import plan
from kvframe.testing.outcome import NotApplicable
from kvframe.testing.subject import Subject

LAYERS = ("first", "second")
_BLOCKS = 5
Bytes = npt.NDArray[np.int64]


@attrs.frozen(kw_only=True, eq=False)
class ViewCase:
    """One example in one layout: a plan of two layers and a few blocks, its buffer, and the family's views.

    Args:
        subject: the family.
        spec: the example, perhaps with a smaller block.
        layout: where its bytes lie.
        config: the plan.
        raw: the device pool's buffer, int8.
        views: the family's views, by layer and name.
    """

    subject: Subject
    spec: Any
    layout: KVCacheLayout
    config: KVCacheConfig
    raw: Any
    views: Mapping[str, Mapping[str, Any]]

    def __repr__(self) -> str:
        return f"{self.spec!r} in layout {self.layout.name}"

    def placements(self) -> Iterator[tuple[KVCacheTensor, Any, int]]:
        """Each placement with the spec that lies there and its number of blocks."""
        for tensor in self.config.tensors:
            spec = self.config.group_of(tensor.layers[0]).layer_specs[tensor.layers[0]]
            yield tensor, spec, self.config.num_blocks_of(tensor)

    def cells(self) -> Iterator[tuple[str, Bytes]]:
        """Each layer and the addresses of its bytes, [blocks, bytes of a block]."""
        for tensor, spec, blocks in self.placements():
            found = addresses(spec, blocks, self.layout, tensor, buffer_bytes=self.raw.numel())
            for index, layer in enumerate(tensor.layers):
                first = found.offset + index * found.strides[0]
                yield layer, _grid(first, found.shape, found.strides[1:]).reshape(blocks, -1)

    def covered(self, view: Any) -> Bytes:
        """The addresses of a view's bytes in the buffer, [blocks, bytes of a block]."""
        size = view.element_size()
        shape, strides = (*view.shape, size), (*(stride * size for stride in view.stride()), 1)
        return _grid(view.data_ptr() - self.raw.data_ptr(), shape, strides).reshape(view.shape[0], -1)


def _grid(first: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Bytes:
    at = np.asarray(first, np.int64)
    for size, stride in zip(shape, strides, strict=True):
        at = at[..., None] + np.arange(size, dtype=np.int64) * stride
    return at


def look_at_views(subject: Subject, look: Callable[[ViewCase], None]) -> NotApplicable | None:
    """Show every example in every layout that can hold it to `look`."""
    if find_spec("torch") is None:
        return NotApplicable("torch is not installed: pip install 'kvframe[torch]'")
    seen = False
    for spec in subject.examples:
        small = with_small_block(spec, (4, 16, 64))
        for layout in subject.host.layouts:
            config = _planned(subject, small, layout)
            if config is not None and all(config.num_blocks_of(tensor) for tensor in config.tensors):
                seen = True
                look(_case(subject, small, layout, config))
    return None if seen else NotApplicable("no layout holds a block of this kind alone")


def with_small_block(spec: Any, sizes: tuple[int, ...]) -> Any:
    """The spec with the first of the block sizes that is below its own and that it takes, else as it is."""
    for block_size in sizes:
        if block_size < spec.block_size:
            try:
                return spec.copy_with_new_block_size(block_size)
            except SpecError:
                continue
    return spec


def _case(subject: Subject, spec: Any, layout: KVCacheLayout, config: KVCacheConfig) -> ViewCase:
    from kvframe.buffers import device_buffer
    from kvframe.views import make_views

    raw = device_buffer(config.pools[DEVICE].size_bytes).tensor
    views = make_views(subject.host, config, {DEVICE: raw})
    return ViewCase(subject=subject, spec=spec, layout=layout, config=config, raw=raw, views=views)


def _planned(subject: Subject, spec: Any, layout: KVCacheLayout) -> KVCacheConfig | None:
    """The plan, None where the layout cannot hold the layers."""
    engine = attrs.evolve(subject.engine(spec, spec.block_size), max_encoder_tokens=spec.block_size)
    held = subject.lifetime(spec).peak(1, spec.block_size, max_encoder_tokens=spec.block_size)
    page = round_up(spec.page_size_bytes, spec.block_stride_bytes_multiple)
    try:
        return plan(
            dict.fromkeys(LAYERS, spec),
            engine=engine,
            # each layer may become a group, whose blocks are as wide as the widest's
            memory=(_BLOCKS + len(LAYERS) * held) * len(LAYERS) * page,
            host=subject.host,
            layout=layout.name,
        ).config
    except (LayoutError, PlanError):
        return None
