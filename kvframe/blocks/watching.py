"""Watcher: who is told of keys and tokens as the manager goes on. Event recorders are watchers; without one nothing is
told, and nothing is paid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvframe.blocks.prefix import KeyWatcher

if TYPE_CHECKING:
    from kvframe.blocks.manager import KVCacheManager


class Watcher(KeyWatcher, Protocol):
    """A `KeyWatcher` that also learns which tokens the rows hold."""

    def attach(self, manager: KVCacheManager) -> None:
        """The manager that calls from now on; once, when it is made."""

    def opened(self, row: int) -> None:
        """A request has got this row; its tokens so far are its `BlockRequest.tokens`."""

    def forked(self, parent: int, row: int) -> None:
        """A request has got this row, with the tokens of the one in `parent`."""

    def appending(self, slots: int | npt.NDArray[np.intp], tokens: npt.NDArray[np.int32]) -> None:
        """One token is about to be added to each of these rows; R stands for the rows 0 … R − 1."""

    def appending_some(self, row: int, tokens: Sequence[Any]) -> None:
        """Tokens are about to be added to a row."""

    def closing(self, row: int) -> None:
        """The row's request is about to leave it."""
