"""Checks of views: what a family's tensors cover, byte by byte, in every layout that can hold them. They need torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvframe.dtypes import KVQuantMode
from kvframe.errors import LayoutError
from kvframe.testing.outcome import NotApplicable, expect
from kvframe.testing.subject import Subject
from kvframe.testing.viewing import LAYERS, ViewCase, look_at_views

_PACKED_ERROR = (
    1.5  # how far packed keys of whole numbers from 0 to 7 may be off: half a step of 3 bits, and more
)


def views_are_windows_on_the_buffer(subject: Subject) -> NotApplicable | None:
    """Every view is a torch tensor over the pool's own memory, with blocks as its first axis.

    Why: kernels write through them. What they write to a copy is lost.
    What to do: slice, `view`, `unflatten`, `transpose`; never `reshape`, `contiguous`, `to` or `clone`.
    """
    return look_at_views(subject, _look_for_windows)


def _look_for_windows(case: ViewCase) -> None:
    memory = case.raw.untyped_storage().data_ptr()
    for tensor, _, blocks in case.placements():
        for layer in tensor.layers:
            expect(bool(case.views[layer]), case, f"layer {layer!r} has no views")
            for name, view in case.views[layer].items():
                own = hasattr(view, "untyped_storage") and view.untyped_storage().data_ptr() == memory
                expect(own, case, f"view {name!r} of layer {layer!r} is no view of the pool's bytes")
                first = tuple(view.shape)[:1]
                expect(
                    first == (blocks,),
                    case,
                    f"view {name!r} has shape {tuple(view.shape)}, of {blocks} blocks",
                )


def views_stay_in_their_block(subject: Subject) -> NotApplicable | None:
    """Block b of a layer's views covers bytes of block b of that layer, and no others.

    Why: one byte further is another block's, or another layer's, or padding that the next plan uses.
    What to do: build views from the `cells` that `make_views` is given, never from the buffer's own arithmetic.
    """
    return look_at_views(subject, _look_outside)


def _look_outside(case: ViewCase) -> None:
    for layer, own in case.cells():
        blocks = np.arange(len(own))[:, None]
        owner = np.full(case.raw.numel(), -1)
        owner[own] = blocks
        for name, view in case.views[layer].items():
            outside = owner[case.covered(view)] != blocks
            count, block = int(outside.sum()), int(outside.any(axis=1).argmax())
            text = (
                f"view {name!r} of layer {layer!r} covers {count} bytes outside its blocks, first of {block}"
            )
            expect(not count, case, text)


def views_do_not_overlap(subject: Subject) -> NotApplicable | None:
    """No two views of a layer share a byte, unless one is a view of plain bytes that spans the other.

    Why: writing one would change the other.
    What to do: compute offsets by adding widths in bytes, in the order in which the kernel stores the pieces.
    """
    return look_at_views(subject, _look_for_overlap)


def _look_for_overlap(case: ViewCase) -> None:
    for layer, views in case.views.items():
        covers = {name: case.covered(view)[-1] for name, view in views.items()}
        for name, one in covers.items():
            mask = np.zeros(case.raw.numel(), bool)
            mask[one] = True
            expect(mask.sum() == len(one), case, f"view {name!r} of layer {layer!r} covers a byte twice")
            for other, two in covers.items():
                shared = int(mask[two].sum()) if name < other else 0
                small, large = sorted((name, other), key=lambda view: len(covers[view]))
                spans = views[large].element_size() == 1 and shared == len(covers[small]) < len(covers[large])
                text = f"views {name!r} and {other!r} of layer {layer!r} share {shared} bytes of a block"
                expect(not shared or spans, case, text)


def views_cover_the_content(subject: Subject) -> NotApplicable | None:
    """The views of a layer cover every byte of its content; only padding is left out.

    Why: bytes that no view shows are memory that is paid for and cannot be used, or a kernel's data without a name.
    What to do: name every piece, scales too; or make the cell smaller.
    """
    return look_at_views(subject, _look_for_hidden_bytes)


def _look_for_hidden_bytes(case: ViewCase) -> None:
    for layer, own in case.cells():
        hidden = np.zeros(case.raw.numel(), bool)
        hidden[own[-1]] = True
        for view in case.views[layer].values():
            hidden[case.covered(view)[-1]] = False
        left = int(hidden.sum())
        expect(
            not left, case, f"no view of layer {layer!r} shows {left} of the {own.shape[1]} bytes of a block"
        )


def views_are_the_same_in_every_layout(subject: Subject) -> NotApplicable | None:
    """The names, shapes and dtypes of the views do not depend on the layout; only strides do.

    Why: a kernel is written once, and takes strides.
    What to do: index axes by their place in [B, H, N, C]; never look at strides.
    """
    first: dict[str, tuple[str, dict[str, Any]]] = {}

    def look(case: ViewCase) -> None:
        views = case.views[LAYERS[0]]
        form = {name: (tuple(view.shape[1:]), view.dtype) for name, view in views.items()}
        layout, wanted = first.setdefault(repr(case.spec), (case.layout.name, form))
        expect(form == wanted, case, f"has views {form}, in layout {layout} {wanted}")

    return look_at_views(subject, look)


def blocks_can_be_moved(subject: Subject) -> NotApplicable | None:
    """A copied block shows through every view what its source shows, a zeroed one shows zeros, and others stay.

    Why: copy-on-write, preemption to the host and zeroing work on whole blocks, whatever the views are.
    What to do: the views must cover the layer's cells and nothing else; see the checks before.
    """
    if not all(spec.has_layer_views for spec in subject.examples):
        return NotApplicable("storage stays raw pages, which the plugin's own runtime moves")
    return look_at_views(subject, _look_at_moves)


def _look_at_moves(case: ViewCase) -> None:
    import torch

    from kvframe.ops import copy_blocks, layer_cache, zero_blocks
    from kvframe.views import create_kv_cache_views

    case.raw.copy_(torch.arange(case.raw.numel()) % 120 + 1)
    now, was = case.raw.numpy(), case.raw.clone().numpy()
    for tensor, spec, blocks in case.placements():
        caches = [
            layer_cache(cells) for cells in create_kv_cache_views(case.raw, spec, blocks, case.layout, tensor)
        ]
        copy_blocks(caches, caches, torch.tensor([[1, 2]]))
        zero_blocks(caches, torch.tensor([3]))
    for layer, own in case.cells():
        expect((now[own[2]] == was[own[1]]).all(), case, f"block 2 of layer {layer!r} is no copy of block 1")
        expect(not now[own[3]].any(), case, f"block 3 of layer {layer!r} is not zero")
        expect((now[own[1]] == was[own[1]]).all(), case, f"block 1 of layer {layer!r} changed")
        for name, view in case.views[layer].items():
            at = case.covered(view)
            same = (now[at[1]] == now[at[2]]).all() and not now[at[3]].any()
            expect(
                same,
                case,
                f"view {name!r} of layer {layer!r} does not show the copy, or the zeros, of a block",
            )


def tokens_come_back(subject: Subject) -> NotApplicable | None:
    """Keys and values that are written to slots come back from them, in any order of slots.

    Why: it is what a cache is for.
    What to do: where the kind packs cells in a way of its own, give its cache dtype `parts` or a `codec`.
    """
    written: list[ViewCase] = []

    def look(case: ViewCase) -> None:
        if case.spec.has_layer_views and case.spec.tokens_per_state > 0 and _round_trip(case):
            written.append(case)

    answer = look_at_views(subject, look)
    none = NotApplicable("no cell of this kind has a codec: only its kernels read and write tokens")
    return answer if answer or written else none


def _round_trip(case: ViewCase) -> bool:
    """Write tokens, read them back; False where nobody but the kernel knows the cells."""
    import torch

    from kvframe.ops import cell_codec, gather_kv, layer_cache, write_kv
    from kvframe.views import create_kv_cache_views

    tensor, spec, blocks = next(case.placements())
    try:
        codec = cell_codec(spec, case.subject.host.cache_dtypes)
    except (LayoutError, AttributeError):  # kernels' own cells, or a spec that is no attention spec
        return False
    cache = layer_cache(create_kv_cache_views(case.raw, spec, blocks, case.layout, tensor)[0], codec)
    seeded = torch.Generator().manual_seed(0)
    slots = torch.randperm(blocks * spec.num_states, generator=seeded)[: 2 * spec.num_states]
    shape = (len(slots), spec.num_kv_heads)
    # small whole numbers are exact in every element type
    key = torch.randint(0, 8, (*shape, spec.head_size), generator=seeded).float()
    value = torch.randint(0, 8, (*shape, spec.head_size_v), generator=seeded).float()
    write_kv(cache, slots, key, value if spec.head_size_v else None)
    found = dict(zip(("key", "value"), gather_kv(cache, slots), strict=True))
    allowed = 0.0 if spec.kv_quant_mode in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR) else _PACKED_ERROR
    for name, given in {"key": key, **({"value": value} if spec.head_size_v else {})}.items():
        worst = float((found[name].float() - given).abs().max())
        expect(
            worst <= allowed,
            case,
            f"a {name} of whole numbers from 0 to 7 comes back with an error of {worst}",
        )
    return True
