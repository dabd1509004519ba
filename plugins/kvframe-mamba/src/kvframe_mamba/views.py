"""The states of a recurrent layer as tensors. torch is imported when views are made, not when the plugin loads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvframe.dtypes import element_size
from kvframe.errors import LayoutError
from kvframe_mamba.spec import MambaSpec

if TYPE_CHECKING:
    import torch


def state_names(spec: MambaSpec) -> tuple[str, ...]:
    """The names of the states, in order: "conv" (several: "conv_0", …), and last the recurrent "ssm"."""
    if len(spec.shapes) == 1:
        return ("conv",) if spec.mamba_type == "short_conv" else ("ssm",)
    convs = len(spec.shapes) - 1
    return (*(("conv",) if convs == 1 else (f"conv_{index}" for index in range(convs))), "ssm")


def make_views(spec: MambaSpec, cells: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each state of every block, [B, *shape], side by side in the page (contract 4.3).

    Args:
        spec: the layer's spec.
        cells: int8 [B, 1, 1, C].

    Raises:
        LayoutError: a state does not start at a multiple of its element; names the state.
    """
    from kvframe.views import typed

    views: dict[str, torch.Tensor] = {}
    offset = 0
    for name, shape, dtype in zip(state_names(spec), spec.shapes, spec.dtypes, strict=True):
        count = math.prod(shape)
        try:
            flat = typed(cells[:, 0, 0], dtype, offset, count)
        except LayoutError as error:
            raise LayoutError(
                layout=error.layout, reason=f"state {name!r} of {type(spec).__name__}: {error.reason}"
            ) from error
        views[name] = flat.unflatten(1, shape)
        offset += count * element_size(dtype)
    return views
