"""HoldBack: which running requests may not grow, since their tenant is at its limit. Asked before a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvframe.blocks.accounts import Accounts
from kvframe.blocks.results import Refused
from kvframe.blocks.rowops import RowOps
from kvframe.blocks.rules import by_name
from kvframe.checks import cdiv

Rows = npt.NDArray[np.intp]


class HoldBack:
    """Sorts out rows that would take their tenant over its limit, in the order of the call.

    Args:
        ops: the rows.
        accounts: what tenants hold.
        tenants: each row's tenant.
    """

    def __init__(self, ops: RowOps, accounts: Accounts, tenants: Rows) -> None:
        self._ops, self._accounts, self._tenants = ops, accounts, tenants
        first, _, last = ops.ledger.cuts
        self._growth = slice(first, last)
        self._rules = [rule for rule in ops.rules if rule.grows]

    def safe_steps(self, most: int) -> int:
        """Steps in which no tenant can come to its limit, if each row computes at most so many tokens a step."""
        rows = [row for row, request in enumerate(self._ops.ledger.requests) if request is not None]
        demand = np.bincount(self._tenants[rows], minlength=1) * sum(self._most(most))
        held, limits = self._accounts.held, self._accounts.running_limit
        steps = [
            max(0, limits[tenant] - held[tenant]) // wanted
            for tenant, wanted in enumerate(demand.tolist())
            if wanted
        ]
        return min(steps, default=0)

    def _most(self, tokens: int) -> list[int]:
        """The most that a row takes for so many tokens, by kind of growth."""
        weights, rules = self._accounts.weights, self._ops.rules
        return [
            sum(weights[g] * (cdiv(tokens, rules[g].block) + rules[g].spare + 2) for g in groups)
            for groups in self._ops.ledger.groups[self._growth]
        ]

    def sort_out(self, rows: int | Rows, new: Any, lookahead: int, in_flight: Any) -> dict[int, Refused]:
        """The rows that must wait, by their places in the call, and why; what is dead anyway may be given back.

        Args:
            rows: the rows of the call, or R for the rows 0 … R − 1.
            new: tokens that each computes.
            lookahead: further tokens that need a place.
            in_flight: tokens of each that have not settled.
        """
        ledger, picked = self._ops.ledger, slice(rows) if isinstance(rows, int) else rows
        after = ledger.computed[picked] + np.asarray(new, np.intp) + lookahead
        woken = after >= ledger.thresholds[self._growth][:, picked]
        growing = woken.any(axis=0).nonzero()[0]
        close = self._close(woken[:, growing], self._tenants[picked][growing], int(np.max(new)) + lookahead)
        if not close:
            return {}
        every = np.arange(rows) if isinstance(rows, int) else rows
        moved, flying = (np.broadcast_to(np.asarray(value), len(every)) for value in (new, in_flight))
        self._bury(
            [place for place, row in enumerate(every.tolist()) if self._tenants[row] in close], every, flying
        )
        places = [p for p in growing.tolist() if moved[p] and self._tenants[every[p]] in close]
        return self._exactly(every, places, moved, lookahead)

    def _close(self, woken: npt.NDArray[np.bool_], tenants: Rows, most: int) -> set[int]:
        """Tenants that may come over their limits, counted with the most that each woken row could take."""
        if not tenants.size:
            return set()
        accounts = self._accounts
        demand = np.bincount(tenants, np.asarray(self._most(most)) @ woken).tolist()
        return {
            tenant
            for tenant, wanted in enumerate(demand)
            if wanted and accounts.held[tenant] + wanted > accounts.running_limit[tenant]
        }

    def _bury(self, places: list[int], rows: Rows, flying: npt.NDArray[Any]) -> None:
        ledger = self._ops.ledger
        for place in places:
            row = int(rows[place])
            if ledger.requests[row] is not None:
                settled = max(0, ledger.computed_at[row] - int(flying[place]))
                for rule in self._ops.rules:
                    if rule.frees:
                        self._ops.bury(rule, row, settled)
                ledger.moved.append(row)

    def _exactly(
        self, rows: Rows, places: list[int], new: npt.NDArray[Any], lookahead: int
    ) -> dict[int, Refused]:
        accounts, ops = self._accounts, self._ops
        waiting: dict[int, Refused] = {}
        held = list(accounts.held)
        for place in places:
            row = int(rows[place])
            tenant, start = int(self._tenants[row]), ops.ledger.computed_at[row]
            needs = [0] * len(ops.rules)
            for rule in self._rules:
                needs[rule.index] = ops.growth(rule, row, start, start + int(new[place]), lookahead)
            wanted = sum(need * weight for need, weight in zip(needs, accounts.weights, strict=True))
            excess = held[tenant] + wanted - self._accounts.running_limit[tenant]
            if wanted and excess > 0:
                missing = cdiv(excess, accounts.whole)
                waiting[place] = Refused(
                    missing=missing, needed=by_name(ops.rules, needs), slot=row, reason="tenant"
                )
            else:
                held[tenant] += wanted
        return waiting
