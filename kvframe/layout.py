"""Memory layouts: the physical order of the logical axes [L, B, H, N, C], and shape and stride arithmetic. No torch.

L layers, B blocks, H head slots, N states of a block, C bytes of one cell. C is always innermost. Strides and sizes
are bytes and always given in the logical order, whatever the layout (contract 3.4, 3.5 and 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from kvframe.errors import LayoutError, nearest

AXES = "LBHNC"
ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}  # what engines call the two oldest layouts

Shape = tuple[int, int, int, int]
Strides = tuple[int, int, int, int, int]


def _check_order(layout: Any, attribute: attrs.Attribute[Any], order: str) -> None:
    if sorted(order) != sorted(AXES) or order[-1] != "C":
        raise LayoutError(
            layout=layout.name,
            reason=f"{attribute.name} = {order!r}: must name each axis of {AXES} once, C last",
            would_work=tuple(known.name for known in builtin_layouts()),
        )


@attrs.frozen
class KVCacheLayout:
    """A physical order of the axes.

    Args:
        name: unique; what plans and options say.
        order: the axes from the outermost to the innermost, such as "BLHNC"; the same as the name unless given.

    Raises:
        LayoutError: the order does not name every axis once, or C is not last.
    """

    name: str
    order: str = attrs.field(
        default=attrs.Factory(lambda self: self.name, takes_self=True), validator=_check_order
    )

    @property
    def physical_order(self) -> tuple[int, ...]:
        """The axes from the outermost to the innermost, as positions in [L, B, H, N, C]."""
        return tuple(AXES.index(axis) for axis in self.order)

    @property
    def layer_order(self) -> tuple[int, ...]:
        """The axes of one layer from the outermost to the innermost, as positions in [B, H, N, C]."""
        return tuple("BHNC".index(axis) for axis in self.order if axis != "L")

    @property
    def layer_compact(self) -> bool:
        """A layer's bytes are one piece."""
        return self.order[0] == "L"

    @property
    def block_outermost(self) -> bool:
        """A block's bytes of all layers are one piece."""
        return self.order[0] == "B"

    @property
    def block_compact(self) -> bool:
        """The page of one layer and block is one piece."""
        return set(self.order[:2]) == {"L", "B"}

    @property
    def block_contiguous(self) -> bool:
        """A page holds its axes in the logical order."""
        return self.order[2:] == "HNC"

    def inner(self, axis: str) -> str:
        """The axis that lies just inside `axis`, which is not C."""
        return self.order[self.order.index(axis) + 1]


LBHNC = KVCacheLayout("LBHNC")
LBNHC = KVCacheLayout("LBNHC")
LHBNC = KVCacheLayout("LHBNC")
BLHNC = KVCacheLayout("BLHNC")
BLNHC = KVCacheLayout("BLNHC")
BHLNC = KVCacheLayout("BHLNC")


def builtin_layouts() -> tuple[KVCacheLayout, ...]:
    """The layouts that every installation knows, the most widely accepted first (contract 4.1); plugins add theirs."""
    return (LBNHC, LBHNC, BLNHC, BLHNC, BHLNC, LHBNC)


class Layouts:
    """The layouts of one plugin host, by name. Frozen once made."""

    def __init__(self, layouts: Iterable[KVCacheLayout]) -> None:
        self._by_name = {layout.name: layout for layout in layouts}

    def __iter__(self) -> Iterator[KVCacheLayout]:
        return iter(self._by_name.values())

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the built-in layouts first."""
        return tuple(self._by_name)

    def get(self, name: str) -> KVCacheLayout:
        """The layout of that name; NHD and HND are LBNHC and LBHNC.

        Raises:
            LayoutError: no layout has the name; says the nearest and all known.
        """
        try:
            return self._by_name[ALIASES.get(name, name)]
        except KeyError:
            near = nearest(name, [*self._by_name, *ALIASES])
            reason = f"no layout has this name{f' (the nearest is {near!r})' if near else ''}"
            raise LayoutError(layout=name, reason=reason, would_work=self.names) from None


def compute_layer_kv_cache_shape_bytes(
    spec: Any, num_blocks: int, kernel_block_size: int | None = None
) -> Shape:
    """The shape (B', H, N', C) of one layer's cache: kernel blocks, head slots, states of a kernel block, bytes.

    Args:
        spec: the layer's spec.
        num_blocks: manager blocks, at least 1.
        kernel_block_size: tokens that the kernel indexes at once; None: the block. It must divide the block.

    Raises:
        LayoutError: `kernel_block_size` does not divide the block, or a number is below 1.
        SpecError: the spec stores raw pages, or a kernel block does not hold whole states.
    """
    _check("num_blocks", num_blocks, num_blocks >= 1, "must be at least 1")
    kernel = spec.block_size if kernel_block_size is None else kernel_block_size
    divides = kernel >= 1 and spec.block_size % kernel == 0
    _check(
        "kernel_block_size",
        kernel,
        divides,
        f"must divide {type(spec).__name__}'s block of {spec.block_size} tokens",
    )
    ratio = spec.block_size // kernel
    states = spec.kernel_states(kernel)
    return (num_blocks * ratio, spec.num_heads, states, spec.state_content_size_bytes)


def compute_layout_strides(
    spec: Any,
    num_blocks: int,
    num_layers: int,
    layout: KVCacheLayout,
    kernel_block_size: int | None = None,
    *,
    fixed: Sequence[int | None] = (None,) * 5,
) -> Strides:
    """The byte strides of [L, B, H, N, C].

    An axis strides over all that lies just inside it, unless `fixed` says otherwise; the inner one of L and B strides
    over the padded page.

    Args:
        spec: the spec of all the layers.
        num_blocks: manager blocks.
        num_layers: layers that lie together.
        layout: the physical order.
        kernel_block_size: tokens; the strides are then those of kernel blocks.
        fixed: strides in logical order that a plan sets, None where it sets none.

    Raises:
        LayoutError: the layout cannot pad these pages (names layouts that can); a fixed stride below 1; or as
            `compute_layer_kv_cache_shape_bytes`.
        SpecError: as there.
    """
    _check("num_layers", num_layers, num_layers >= 1, "must be at least 1")
    valid = len(fixed) == len(AXES) and all(stride is None or stride >= 1 for stride in fixed)
    _check("fixed", tuple(fixed), valid, "must have one entry for each of L, B, H, N, C: None, or at least 1")
    given = dict(zip(AXES, fixed, strict=True))
    shape = compute_layer_kv_cache_shape_bytes(spec, num_blocks, kernel_block_size)
    size = dict(zip(AXES, (num_layers, *shape), strict=True))
    padded_axis = None
    if spec.page_size_bytes != spec.unpadded_page_size_bytes:
        padded_axis = max("LB", key=layout.order.index)
        reason = _cannot_pad(spec, size, layout, kernel_block_size)
        if reason:
            would_work = [
                other.name
                for other in builtin_layouts()
                if not _cannot_pad(spec, size, other, kernel_block_size)
            ]
            raise LayoutError(layout=layout.name, reason=reason, would_work=would_work)
    stride = {"C": given["C"] or 1}
    for axis in reversed(layout.order[:-1]):
        inner = layout.inner(axis)
        base = stride[inner] * size[inner]
        if axis == padded_axis:
            base = _padded(spec, base, layout)
        stride[axis] = given[axis] or base
    lbhnc: Strides = (stride["L"], stride["B"], stride["H"], stride["N"], stride["C"])
    return lbhnc


def split_refusal(spec: Any, block_stride: int, layout: KVCacheLayout) -> LayoutError:
    """The error for kernel blocks where pages `block_stride` bytes apart are not one dense run of cells."""
    dense = spec.unpadded_page_size_bytes
    padded = spec.page_size_bytes != dense
    would_work = [x.name for x in builtin_layouts() if x.layer_compact and x.block_compact and not padded]
    advice = "use a smaller block, or another layout" if would_work else "use a page without padding"
    return LayoutError(
        layout=layout.name,
        reason=(
            f"kernel blocks need pages that are dense and follow each other; {type(spec).__name__}'s pages of "
            f"{dense} bytes lie {block_stride} bytes apart, in the order {layout.order}; {advice}"
        ),
        would_work=would_work,
    )


def _padded(spec: Any, base: int, layout: KVCacheLayout) -> int:
    page: int = spec.page_size_bytes
    stride = max(base, page)
    if stride % page:
        raise LayoutError(
            layout=layout.name,
            reason=f"the stride of {stride} bytes must be a multiple of the padded page of {page} bytes",
        )
    return stride


def _cannot_pad(spec: Any, size: dict[str, int], layout: KVCacheLayout, kernel: int | None) -> str:
    """Why the layout cannot pad the spec's pages, "" if it can."""
    page, content = spec.page_size_bytes, spec.unpadded_page_size_bytes
    what = f"{type(spec).__name__}'s page of {content} bytes, padded to {page},"
    if kernel not in (None, spec.block_size):
        return f"{what} cannot be cut into kernel blocks of {kernel} tokens"
    innermost = max(layout.order.index(axis) for axis in "LB")
    outside = [axis for axis in layout.order[:innermost] if axis not in "LB" and size[axis] != 1]
    if outside:
        axes = ", ".join(f"{axis} (size {size[axis]})" for axis in outside)
        return f"{what} is not one piece: axis {axes} lies outside it"
    return ""


def _check(field: str, value: Any, holds: bool, rule: str) -> None:
    if not holds:
        raise LayoutError(layout="any", reason=f"{field} = {value!r}: {rule}")
