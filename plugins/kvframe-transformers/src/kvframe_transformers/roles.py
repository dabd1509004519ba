"""Which cache of the plan serves which layer of a transformers model, and what that layer's attention is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from transformers.cache_utils import DummyLayer, get_layer_types_and_kwargs

from kvframe.errors import UsageError
from kvframe.models import ModelSpecs
from kvframe_transformers.layers import PagedCrossLayer, PagedLayer, PagedWindowLayer
from kvframe_transformers.session import Session
from kvframe_transformers.state_layers import PagedHybridLayer, PagedStateLayer

# transformers' word for a layer to the kinds of kvframe that keep what such a layer is shown
_TOKENS: Mapping[str, frozenset[str]] = {
    "full_attention": frozenset({"full_attention", "mla"}),
    "sliding_attention": frozenset({"full_attention", "sliding_attention"}),
    "chunked_attention": frozenset({"full_attention", "chunked_attention"}),
    "hybrid": frozenset({"full_attention"}),
}
_STATES = frozenset({"conv", "linear_attention", "hybrid"})
_NOTHING = "dummy"


@attrs.frozen(kw_only=True)
class Role:
    """One layer of the model.

    Args:
        tokens: its token cache in the plan.
        state: its state's.
        cross: that of the encoder's output.
        window: columns that its attention is shown, those of the step not counted, plus one; None: all.
    """

    tokens: str | None = None
    state: str | None = None
    cross: str | None = None
    window: int | None = None

    def layer(self, session: Session) -> Any:
        """transformers' layer over a batch."""
        if self.tokens and self.state:
            return PagedHybridLayer(session, self.tokens, self.state)
        if self.state:
            return PagedStateLayer(session, self.state)
        if self.tokens and self.window:
            return PagedWindowLayer(session, self.tokens, self.window)
        return PagedLayer(session, self.tokens) if self.tokens else DummyLayer()


@attrs.frozen
class Roles:
    """All layers of a model, in order."""

    roles: tuple[Role, ...]

    @property
    def windows(self) -> dict[str, int]:
        """Token cache to the window of its layer, where it has one."""
        return {role.tokens: role.window for role in self.roles if role.tokens and role.window}

    def layers(self, session: Session) -> list[Any]:
        """transformers' layers over a batch."""
        return [role.layer(session) for role in self.roles]

    def cross_layers(self, session: Session) -> list[Any]:
        """Those of the encoder's output."""
        return [PagedCrossLayer(session, role.cross) for role in self.roles if role.cross]


def read_roles(config: Any, model: ModelSpecs) -> Roles:
    """Match transformers' layers with those that kvframe has read.

    Args:
        config: the model's PreTrainedConfig.
        model: its specs.

    Raises:
        UsageError: transformers and kvframe read a layer differently; names the layer and both kinds.
    """
    words: list[str]
    arguments: list[dict[str, Any]]
    if config.is_encoder_decoder:  # whose config may say the encoder's depth
        words, arguments = ["full_attention"] * model.num_layers, [{}] * model.num_layers
    else:
        words, arguments = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    if len(words) != model.num_layers:
        rule = f"transformers has {len(words)} layers, kvframe read {model.num_layers}"
        raise UsageError(option="config", value=None, rule=rule)
    caches: dict[int, dict[str, str]] = {}
    for name, index in model.indices.items():
        caches.setdefault(index, {})[model.kinds[name]] = name
    return Roles(
        tuple(
            _role(index, word, given.get("sliding_window"), caches.get(index, {}))
            for index, (word, given) in enumerate(zip(words, arguments, strict=True))
        )
    )


def _role(index: int, word: str, window: int | None, caches: Mapping[str, str]) -> Role:
    if word == _NOTHING:
        return Role()
    tokens = next((name for kind, name in caches.items() if kind in _TOKENS.get(word, ())), None)
    cross = caches.get("cross_attention")
    known = {*_TOKENS.get(word, ()), "cross_attention"}
    states = [name for kind, name in caches.items() if kind not in known]
    state = states[0] if word in _STATES and len(states) == 1 else None
    complete = bool(tokens) == (word in _TOKENS) and bool(state) == (word in _STATES)
    if not complete or len(caches) != sum(map(bool, (tokens, state, cross))):
        kinds = ", ".join(caches) or "nothing"
        rule = f"transformers keeps {word!r} there, kvframe read {kinds}: this bridge does not serve that"
        raise UsageError(option=f"layer {index}", value=None, rule=rule)
    return Role(tokens=tokens, state=state, cross=cross, window=window)
