"""Ledger: the counts of every running request, by row, and the token counts at which a row next needs work."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from kvframe.blocks.arrays import items
from kvframe.blocks.config import BlockConfig
from kvframe.blocks.counts import Counts
from kvframe.blocks.errors import BlockError
from kvframe.blocks.requests import BlockRequest
from kvframe.blocks.rules import NEVER, GroupRule

Tokens = npt.NDArray[np.intp]


class Ledger:
    """Structure of arrays over the rows. `thresholds[event, row]` is the count that wakes a row for one kind of event.

    Events come in this order: deaths, growth of token groups, growth of state groups, keys; `cuts` says where the last
    three begin. An event may fire too early (drafts, tokens in flight); it never fires too late. All counts have an
    index's width: numpy takes them as such, and a cast costs it more than the rest.

    Args:
        config: limits.
        rules: the groups.

    Attributes:
        kinds: by kind of event, what happens and the group; of groups that grow together, the first.
        groups: by kind, all groups to which it happens.
    """

    def __init__(self, config: BlockConfig, rules: tuple[GroupRule, ...]) -> None:
        rows, groups = config.max_requests, len(rules)
        self.rows = rows
        self.computed_counts = Counts(rows)  # tokens whose content is stored or scheduled
        self.known_counts = Counts(rows)  # tokens whose ids are known
        self.prompt = np.zeros(rows, np.intp)
        self.freed = np.zeros((groups, rows), np.intp)  # entries below are dead and given back
        self.registered = np.zeros((groups, rows), np.intp)  # entries below were keyed, or passed over
        self.requests: list[BlockRequest | None] = [None] * rows
        # Rows whose counts or thresholds changed otherwise than by a step of one token; who looks ahead clears it.
        self.moved: list[int] = []
        self._free_rows = list(range(rows))

        # Tables with equal entries for every token count always grow together: the first stands for all of them.
        alike: dict[tuple[int, int], list[int]] = {}
        for rule in rules:
            if rule.grows and not rule.state:
                alike.setdefault((rule.block, rule.spare), []).append(rule.index)
        grown_with = {groups[0]: tuple(groups) for groups in alike.values()}
        states = [rule.index for rule in rules if rule.state]
        deaths = [rule.index for rule in rules if rule.frees]
        keys = [rule.index for rule in rules if rule.publishing is not None]
        self.kinds = tuple(
            (kind, g)
            for kind, group_list in (("die", deaths), ("grow", grown_with), ("state", states), ("key", keys))
            for g in group_list
        )
        self.groups = tuple(grown_with[g] if kind == "grow" else (g,) for kind, g in self.kinds)
        grown = len(deaths) + len(grown_with)
        self.cuts = (len(deaths), grown, grown + len(states))
        self.thresholds = np.full((len(self.kinds), rows), NEVER, np.intp)
        self._threshold_at = tuple(items(row) for row in self.thresholds)
        at = dict(zip(self.kinds, self._threshold_at, strict=True))
        self.grow_at = {
            g: at[kind, first]
            for (kind, first), groups in zip(self.kinds, self.groups, strict=True)
            if kind in ("grow", "state")
            for g in groups
        }
        self.die_at = {g: at[kind, g] for kind, g in self.kinds if kind == "die"}
        self.key_at = {g: at[kind, g] for kind, g in self.kinds if kind == "key"}
        self.prompt_at = items(self.prompt)
        self.freed_at = tuple(items(row) for row in self.freed)
        self.registered_at = tuple(items(row) for row in self.registered)

    @property
    def computed(self) -> Tokens:
        """By row, tokens whose content is stored or scheduled; it holds until the next step."""
        return self.computed_counts.array

    @property
    def computed_at(self) -> memoryview:
        """`computed` for loops."""
        return self.computed_counts.at

    @property
    def known(self) -> Tokens:
        """By row, tokens whose ids are known; it holds until the next `append`."""
        return self.known_counts.array

    @property
    def known_at(self) -> memoryview:
        """`known` for loops."""
        return self.known_counts.at

    @property
    def has_room(self) -> bool:
        """Whether a row is free."""
        return bool(self._free_rows)

    def open(self, request: BlockRequest) -> int:
        """Give a request the lowest free row."""
        row = heapq.heappop(self._free_rows)
        self.moved.append(row)
        self.requests[row] = request
        self.computed_at[row] = 0
        self.known_at[row] = request.num_tokens
        self.prompt_at[row] = request.prompt
        for counts in (*self.freed_at, *self.registered_at):
            counts[row] = 0
        return row

    def close(self, row: int) -> BlockRequest:
        """Free a row; its thresholds never fire again."""
        request = self.request(row)
        self.requests[row] = None
        for threshold in self._threshold_at:
            threshold[row] = NEVER
        self.moved.append(row)
        heapq.heappush(self._free_rows, row)
        return request

    def request(self, row: int) -> BlockRequest:
        """The request of a row.

        Raises:
            BlockError: the row holds none.
        """
        request = self.requests[row] if 0 <= row < self.rows else None
        if request is None:
            raise BlockError(what="slot", value=row, rule="holds no running request")
        return request
