"""Loans: states that a model changes in place, out of their blocks for as long as one layer runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvframe_transformers.engine import Engine
from kvframe_transformers.forward import Forward, Numbers
from kvframe_transformers.rows import Row
from kvframe_transformers.storage import CONV
from kvframe_transformers.taking import states_of


class Loans:
    """What is lent of one batch's states.

    Args:
        engine: whose blocks.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lent: dict[tuple[str, str], torch.Tensor] = {}
        self._rows: Sequence[Row] = ()
        self._length = 0
        self._forward: Forward | None = None

    def of(self, rows: Sequence[Row], length: int, forward: Forward | None) -> Loans:
        """The same loans, for the batch as it is now.

        Args:
            rows: its sequences.
            length: columns, those of the pass under way included.
            forward: the pass.
        """
        self._rows, self._length, self._forward = rows, length, forward
        return self

    def lend(self, layer: str, state: str, tensor: torch.Tensor) -> torch.Tensor:
        """Note that the model may change this tensor; it is stored when another layer asks for its own."""
        if any(name != layer for name, _ in self._lent):
            self.check_in()
        self._lent[layer, state] = tensor
        return tensor

    def get(self, layer: str, state: str) -> torch.Tensor:
        """A state of all sequences, lent."""
        found = self._lent.get((layer, state))
        if found is None:
            store, blocks = (
                self._engine.storage.states[layer],
                self._engine.storage.index(self._blocks(layer)),
            )
            found = store.read_conv(blocks) if state == CONV else store.read_ssm(blocks)
            self.lend(layer, state, found)
        return found

    def replace(self, layer: str, state: str, tensor: torch.Tensor) -> torch.Tensor:
        """The model has given the new state itself."""
        self._lent.pop((layer, state), None)
        return self.lend(layer, state, tensor)

    def check_in(self) -> None:
        """Store what was lent."""
        lent, self._lent = self._lent, {}
        for (layer, state), tensor in lent.items():
            self._write(layer, state, tensor)

    def drop(self) -> None:
        """Forget what was lent."""
        self._lent.clear()

    def _write(self, layer: str, state: str, tensor: torch.Tensor) -> None:
        store, forward = self._engine.storage.states[layer], self._forward
        if forward is None:
            blocks = states_of(self._engine, self._rows, store.group, self._counts())
        else:
            blocks = forward.state_to[store.group]
            forward.unwritten.discard(layer)
        rows = np.flatnonzero(blocks)  # a sequence of which only padding has come has no state
        index = self._engine.storage.index
        write = store.write_conv if state == CONV else store.write_ssm
        write(index(rows), index(blocks[rows]), tensor)

    def _blocks(self, layer: str) -> Numbers:
        """[B], the blocks of the state that the pass starts from."""
        group = self._engine.storage.states[layer].group
        if self._forward is not None and layer in self._forward.unwritten:
            return self._forward.state_from[group]
        return states_of(self._engine, self._rows, group, self._counts())

    def _counts(self) -> Numbers:
        return np.array([row.count(self._length) for row in self._rows], np.int64)
