"""transformers' layer classes over a session: what the model's layers and masks ask, answered from blocks."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvframe_transformers.errors import CacheStateError
from kvframe_transformers.session import Session
from kvframe_transformers.storage import TokenStore, flat

Pair = tuple[torch.Tensor, torch.Tensor]


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer that attends to everything, or to latent vectors.

    Args:
        session: the batch.
        name: the layer's cache in the plan.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._name = session, name

    @property
    def _store(self) -> TokenStore:
        return self._session.engine.storage.tokens[self._name]

    @property
    def is_initialized(self) -> bool:
        """Whether it holds tokens."""
        return self.get_seq_length() > 0

    @property
    def keys(self) -> torch.Tensor | None:
        """What the next step would see, [batch, heads, tokens, width]; None before the first."""
        return self._stored()[0] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        """As `keys`."""
        return self._stored()[1] if self.is_initialized else None

    def _stored(self) -> Pair:
        store, stop = self._store, self.get_seq_length()
        first = self._session.engine.first_column(self._name, stop)
        key, value = store.read(self._session.places.slots_of(store.group, store.tokens, first, stop))
        return key.contiguous(), value.contiguous()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the pool has all memory from the start."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store new keys and values; returns those that attention sees, old and new.

        Args:
            key_states: [batch, heads, new, width].
            value_states: [batch, heads, new, width of V].
        """
        session, store = self._session, self._store
        batch, _, new, _ = key_states.shape
        forward = session.forward_of(self._name, batch, new)
        if forward is None:
            session.defer(self._name, key_states, value_states)
            return key_states.contiguous(), value_states.contiguous()
        first = session.engine.first_column(self._name, forward.start)
        if store.planes is not None and forward.stored_whole:
            store.store(forward, key_states, value_states)
            seen = tuple(
                plane.take(forward.seen_index(store.group, store.tokens, first, plane), batch).to(
                    key_states.dtype
                )
                for plane in store.planes
            )
        else:
            old: Pair | None = forward.early.pop(self._name, None)
            if old is None and first < forward.start:
                old = store.read(forward.read_slots(store.group, store.tokens, first))
            seen = _joined(old, (key_states, value_states))
            store.store(forward, key_states, value_states)
        session.wrote(self._name, new)
        return seen[0], seen[1]

    def get_seq_length(self) -> int:
        """Columns that it holds."""
        return self._session.seen[self._name]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the next step sees, and the column of the first."""
        seen = self.get_seq_length()
        first = self._session.engine.first_column(self._name, seen)
        return seen - first + query_length, first

    def get_max_length(self) -> int:
        """Columns that it can hold."""
        return self._session.engine.planned.engine.max_model_len

    def reset(self) -> None:
        """The cache resets all layers at once."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """The cache reorders all layers at once."""


class PagedWindowLayer(PagedLayer):
    """Keys and values of a layer with a sliding window, or chunks.

    Args:
        session: the batch.
        name: the layer's cache in the plan.
        sliding_window: tokens that a query sees, itself included.
    """

    is_sliding = True

    def __init__(self, session: Session, name: str, sliding_window: int) -> None:
        super().__init__(session, name)
        self.sliding_window = sliding_window

    @property
    def record_past(self) -> bool:
        """Whether dead tokens stay until the next crop."""
        return self._session.recording

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self._session.recording = value

    def activate_past_recording(self) -> None:
        """Keep what dies until the next crop."""
        self._session.recording = True

    def get_max_length(self) -> int:
        """Tokens of the window."""
        return self.sliding_window


class PagedCrossLayer(PagedLayer):
    """Keys and values of the encoder's output, stored once."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store the encoder's keys and values, [batch, heads, positions, width]."""
        session, store = self._session, self._store
        if session.cross_seen.get(self._name):
            raise CacheStateError(
                what="the encoder's keys are stored already", advice="Make a new cache for other inputs"
            )
        session.admit_encoder(key_states.shape[0], key_states.shape[2])
        slots = self._slots(key_states.shape[2]).reshape(-1)
        store.write(slots, flat(key_states), flat(value_states))
        session.cross_seen[self._name] = key_states.shape[2]
        return _joined(None, (key_states, value_states))

    def _slots(self, stop: int) -> torch.Tensor:
        store = self._store
        return self._session.places.slots_of(store.group, store.tokens, 0, stop, encoder=True)

    def _stored(self) -> Pair:
        key, value = self._store.read(self._slots(self.get_seq_length()))
        return key.contiguous(), value.contiguous()

    def get_seq_length(self) -> int:
        """Positions of the encoder that it holds."""
        return self._session.cross_seen.get(self._name, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All positions, from the first."""
        return self.get_seq_length() or query_length, 0


def _joined(old: Pair | None, new: Pair) -> Pair:
    """Old and new, contiguous and in the precision of the new: as one concatenation would give them."""
    if old is None:
        return new[0].contiguous(), new[1].contiguous()
    key, value = (_concatenated(before, after) for before, after in zip(old, new, strict=True))
    return key, value


def _concatenated(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    stored = before.shape[2]
    joined = after.new_empty((*after.shape[:2], stored + after.shape[2], after.shape[3]))
    joined[:, :, :stored] = before
    joined[:, :, stored:] = after
    return joined
