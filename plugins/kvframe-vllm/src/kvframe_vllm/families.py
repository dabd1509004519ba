"""Families that only kvframe knows, for vLLM: one plugin brings a kind of cache to both.

An attention layer of a model returns `engine_spec(spec)` from its `get_kv_cache_spec`. vLLM plans and allocates it by
the family's fields and lifetime, on its own manager or on kvframe's.
"""

from __future__ import annotations

from typing import Any

from kvframe.errors import MissingPluginError
from kvframe.plugins import load_plugins
from kvframe.spec import AttentionSpec
from kvframe_vllm.errors import UnknownSpecError


def engine_spec(spec: Any, layer: str = "?") -> Any:
    """A kvframe spec of a family that vLLM does not know, as a spec that vLLM plans and manages.

    Args:
        spec: an AttentionSpec of kvframe whose family some plugin brings.
        layer: its layer, for errors.

    Raises:
        UnknownSpecError: no plugin brings the family, or it keeps something else than tokens of the request.
    """
    name = type(spec).__name__
    try:
        lifetime = load_plugins().family(spec).lifetime(spec)
    except MissingPluginError as error:
        raise UnknownSpecError(spec=name, layer=layer, side="vLLM", advice=str(error).rstrip(".")) from error
    if not isinstance(spec, AttentionSpec):
        advice = "Only specs that derive from kvframe's AttentionSpec can be made vLLM's"
        raise UnknownSpecError(spec=name, layer=layer, side="vLLM", advice=advice)
    if lifetime.state or lifetime.fixed is not None or lifetime.source != "decoder" or lifetime.spare:
        advice = "Only families that keep the request's tokens can be made vLLM's, not states or rings"
        raise UnknownSpecError(spec=name, layer=layer, side="vLLM", advice=advice)
    from kvframe_vllm.family_spec import FamilySpec, register

    register()
    return FamilySpec.of(spec)
