"""transformers' layers with recurrent state, over a session."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvframe.errors import UsageError
from kvframe_transformers.layers import PagedLayer
from kvframe_transformers.session import Session
from kvframe_transformers.storage import CONV, SSM


class _Lent:
    """A layer's state as transformers indexes it: by the number of the state, of which there is one."""

    def __init__(self, layer: PagedStateLayer, state: str) -> None:
        self._layer, self._state = layer, state

    def __getitem__(self, state_idx: int) -> torch.Tensor:
        return self._layer.lent(self._state)


class PagedStateLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """Recurrent state of one layer. The model changes what it is given in place, so it is lent a copy of the block.

    Args:
        session: the batch.
        state_name: the state's cache in the plan.
    """

    is_compileable = False
    is_croppable = False  # a recurrent state cannot go back
    supports_early_init = False
    number_of_states = 1
    record_past = False

    def __init__(self, session: Session, state_name: str) -> None:
        self._session, self._state_name = session, state_name
        self.conv_states, self.recurrent_states = _Lent(self, CONV), _Lent(self, SSM)
        self.has_previous_state = {0: session.length > 0}  # by the number of the state

    @property
    def is_conv_states_initialized(self) -> dict[int, bool]:
        """Whether there is a state."""
        return self.has_previous_state

    @property
    def is_recurrent_states_initialized(self) -> dict[int, bool]:
        """Whether there is a state."""
        return self.has_previous_state

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the pool has all memory from the start."""

    def activate_past_recording(self) -> None:
        """Nothing: a state has no past."""

    def lent(self, state: str) -> torch.Tensor:
        """The state of all sequences, which the model may change."""
        return self._session.loans.get(self._state_name, state)

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Store the last inputs of the convolution; returns them after those that it had.

        Args:
            conv_states: [batch, channels, new].
            state_idx: 0.
            conv_kernel_size: inputs that the model keeps; None: as many as it gives.
        """
        self._one(state_idx)
        session, name = self._session, self._state_name
        session.admit_states(conv_states.shape[0], conv_states.shape[-1])
        store = session.engine.storage.states[name]
        store.columns = conv_kernel_size or store.columns or conv_states.shape[-1]
        if self.has_previous_state[0]:
            full = torch.cat([self.lent(CONV), conv_states], dim=-1)
        else:
            missing = max(0, store.columns - conv_states.shape[-1])
            full = torch.nn.functional.pad(conv_states, (missing, 0)) if missing else conv_states
        session.loans.replace(name, CONV, full[..., -store.columns :].clone())
        self.has_previous_state[0] = True
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Store the recurrent state, [batch, …]."""
        self._one(state_idx)
        session, name = self._session, self._state_name
        session.admit_states(recurrent_states.shape[0], 1)
        store = session.engine.storage.states[name]
        store.shape = tuple(recurrent_states.shape[1:])
        if SSM in store.dtypes:
            recurrent_states = recurrent_states.to(store.dtypes[SSM])
        return session.loans.replace(name, SSM, recurrent_states)

    def _one(self, state_idx: int) -> None:
        if state_idx:
            raise UsageError(option="state_idx", value=state_idx, rule="a layer has one state here")

    def reset(self) -> None:
        """There is no state; the cache gives all blocks back at once."""
        self.has_previous_state[0] = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """The cache reorders all layers at once."""

    def crop(self, tokens_to_remove: int) -> None:
        """The cache crops all layers at once."""


class PagedHybridLayer(PagedStateLayer, PagedLayer):
    """A layer with keys and values beside a recurrent state.

    Args:
        session: the batch.
        name: its tokens' cache in the plan.
        state_name: its state's.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, session: Session, name: str, state_name: str) -> None:
        PagedLayer.__init__(self, session, name)
        PagedStateLayer.__init__(self, session, state_name)

    def get_max_length(self) -> int:
        """Columns that it can hold."""
        return PagedLayer.get_max_length(self)
