"""A plain engine around the block manager, for one family beside full attention: it knows what every block holds.

Content is a number for each prefix of tokens: a block holds the right thing if it holds the number of the prefix that
ends with its last written token. Reads are looked at before every step, as a kernel would read.
"""

from __future__ import annotations

import random
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.blocks import (
    Admission,
    BlockConfig,
    BlockRequest,
    GroupBlocks,
    Hit,
    KVCacheManager,
    Served,
    chunk_stops,
)
from kvframe.blocks.state import exported_position
from kvframe.checks import cdiv
from kvframe.lifetime import Lifetime
from kvframe.testing.outcome import expect
from kvframe.testing.simulate import alive_entries, entries_that_a_hit_needs

_ROWS = 4
_OWN = -1  # content of blocks that are one request's for life, minus its number


@attrs.define(kw_only=True)
class _Running:
    """A request as the engine sees it."""

    request: BlockRequest
    tokens: list[int]
    prompt: int
    number: int
    computed: int = 0
    state_blocks: dict[int, int] = attrs.field(factory=dict)
    prefixes: list[int] = attrs.field(factory=lambda: [0])  # the number of each prefix, by its length


class World:
    """The engine: requests under way, what every block holds, and the laws.

    Args:
        spec: the example, for messages.
        lifetime: the family's rule for it.
        seed: of the random steps.
    """

    def __init__(self, spec: Any, lifetime: Lifetime, seed: int) -> None:
        self.spec, self.random = spec, random.Random(seed)
        longest = min(4096, max(8 * lifetime.block, 2 * (lifetime.steady_from or 0), 200))
        fixed = (lifetime.fixed or 0) * _ROWS
        rules = {"full": Lifetime(block=lifetime.block), "tested": lifetime}
        groups: Any = [GroupBlocks(name=name, lifetime=rule) for name, rule in rules.items()]
        self.config = BlockConfig(
            groups=groups,
            num_blocks=4 + fixed + 5 * cdiv(longest, lifetime.block) + _ROWS * (lifetime.spare + 2),
            max_model_len=longest,
            max_requests=_ROWS,
            max_encoder_tokens=lifetime.block,
        )
        self.manager = KVCacheManager(self.config)
        self.content = np.zeros(self.config.num_blocks, np.int64)
        self.rows: dict[int, _Running] = {}
        self.waiting: list[_Running] = []
        self._prefixes: dict[tuple[int, int], int] = {}
        self._numbers = 0

    # --- steps ---

    def run(self, steps: int) -> None:
        """Random steps, then everything is given back.

        Raises:
            ConformanceError: a law is broken; says which, where, and after how many tokens.
        """
        for _ in range(steps):
            if self.random.random() < 0.4 and len(self.rows) < _ROWS:
                self._admit()
            self._step()
            if self.rows and self.random.random() < 0.1:
                self._leave(self.random.choice(list(self.rows)))
            self._balance()
        for row in list(self.rows):
            self._leave(row)
        free, total = self.manager.num_free, self.config.num_blocks - 1
        self._expect(free == total, f"after all requests have left, {free} of {total} blocks are free")

    def _new(self) -> _Running:
        """A request that often begins like others: one of three stems, cut somewhere, and a tail of its own."""
        stem = self.random.randrange(3)
        longest = self.config.max_model_len // 2
        tokens = [(7 * stem + i) % 11 for i in range(self.random.randrange(longest))]
        tokens += [self.random.randrange(2) for _ in range(self.random.randrange(1, 9))]
        request = self.manager.request(np.asarray(tokens, np.int32))
        return _Running(request=request, tokens=tokens, prompt=len(tokens), number=0)

    def _admit(self) -> None:
        running = self.waiting.pop(0) if self.waiting else self._new()
        self._numbers += 1
        running.number = self._numbers
        hit = self.manager.lookup(running.request)
        self._check_hit(running, hit)
        end = self._chunk_end(hit.tokens, len(running.tokens), len(running.tokens), hit.junction)
        admission = Admission(
            request=running.request,
            num_new_tokens=end - hit.tokens,
            encoder_tokens=self.config.max_encoder_tokens,
            hit=hit,
        )
        (answer,) = self.manager.admit([admission], busy=bool(self.rows))
        if not isinstance(answer, Served):
            self.waiting.append(running)
            return
        row = answer.slot
        self.rows[row] = running
        for g, rule in self._rules():
            if rule.fixed is not None or rule.source == "encoder":
                self.content[self._table(g, row)] = _OWN - running.number
            elif rule.state and hit.tokens:
                running.state_blocks[g] = int(self._table(g, row)[cdiv(hit.tokens, rule.block) - 1])
            elif rule.hits == "free" and hit.tokens:  # what a hit does not bring, the engine computes again
                self._write_tokens(g, row, 0, hit.tokens, skip_dead=True)
        self._copies()
        self._compute(row, hit.tokens, end)

    def _step(self) -> None:
        for row in list(self.rows):
            if len(self.rows[row].tokens) + 1 >= self.config.max_model_len:
                self._leave(row)
        known = [row for row, running in self.rows.items() if running.computed >= len(running.tokens)]
        tokens = [self.random.randrange(2) for _ in known]
        if known:
            self.manager.append(known, np.asarray(tokens, np.int32))
        for row, token in zip(known, tokens, strict=True):
            self.rows[row].tokens.append(token)
        slots = list(self.rows)
        ends = {}
        for row in slots:
            running = self.rows[row]
            end = self.random.randint(running.computed + 1, len(running.tokens))
            ends[row] = self._chunk_end(running.computed, end, len(running.tokens), running.request.junction)
        counts = np.asarray([ends[row] - self.rows[row].computed for row in slots], np.int32)
        result = self.manager.step(slots, counts)
        self._copies()
        refused = {answer.slot for answer in result.refused}
        for row in slots:
            if row in refused:
                self._preempt(row)
            else:
                self._check_nulls(row)
                self._compute(row, self.rows[row].computed, ends[row])

    def _preempt(self, row: int) -> None:
        running = self.rows.pop(row)
        self.manager.preempt([row])
        running.computed = 0
        running.state_blocks.clear()
        self.waiting.append(running)

    def _chunk_end(self, start: int, stop: int, known: int, junction: int) -> int:
        return chunk_stops(self.config, start, stop, known, junction) if stop - start > 1 else stop

    def _leave(self, row: int) -> None:
        self.manager.release([row])
        del self.rows[row]

    # --- content ---

    def _rules(self) -> list[tuple[int, Lifetime]]:
        return [(g, group.lifetime) for g, group in enumerate(self.config.groups)]

    def _table(self, g: int, row: int) -> npt.NDArray[np.int64]:
        return self.manager.tables.row(g, row).astype(np.int64)

    def _prefix(self, g: int, running: _Running, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers of the prefixes that end there, told apart by group."""
        numbers, known = running.prefixes, self._prefixes
        for token in running.tokens[len(numbers) - 1 :]:
            numbers.append(known.setdefault((numbers[-1], token), len(known) + 1))
        found = [numbers[end] * len(self.config.groups) + g + 1 for end in ends.reshape(-1).tolist()]
        return np.asarray(found, np.int64).reshape(ends.shape)

    def _copies(self) -> None:
        for copy in self.manager.take_copies():
            self.content[copy.target] = self.content[copy.source]

    def _compute(self, row: int, start: int, stop: int) -> None:
        """A kernel reads what it needs at `start`, and writes the tokens up to `stop`."""
        fresh = self.manager.take_fresh()
        running = self.rows[row]
        for g, rule in self._rules():
            if rule.fixed is not None or rule.source == "encoder":
                own = (self.content[self._table(g, row)] == _OWN - running.number).all()
                self._expect(own, f"another request wrote a block that request {running.number} has for life")
            elif rule.state:
                self._run_state(g, rule, row, start, stop, fresh[g])
            else:
                self._check_tokens(g, rule, row, start)
                self._write_tokens(g, row, start, stop)
        running.computed = stop

    def _run_state(self, g: int, rule: Lifetime, row: int, start: int, stop: int, fresh: list[int]) -> None:
        running, table = self.rows[row], self._table(g, row)
        if start:
            block = running.state_blocks[g]
            right = block in table and self.content[block] == self._prefix(g, running, np.asarray(start))
            self._expect(right, f"the state after {start} tokens is gone when the next token needs it")
        running.state_blocks[g] = block = int(table[-1 - rule.spare])
        self._expect(block, f"there is no block for the state after {stop} tokens")
        self.content[block] = self._prefix(g, running, np.asarray(stop))
        saved = exported_position(self.config, g, start, stop, max(running.prompt, len(running.tokens) - 1))
        column = cdiv(stop, rule.block) - 2
        if saved and column >= 0 and table[column] in fresh:
            self.content[table[column]] = self._prefix(g, running, np.asarray(saved))

    def _check_tokens(self, g: int, rule: Lifetime, row: int, start: int) -> None:
        running, table = self.rows[row], self._table(g, row)
        alive = alive_entries(rule, start, running.prompt, cdiv(start, rule.block))
        wanted = self._prefix(g, running, np.minimum((alive + 1) * rule.block, start))
        wrong = alive[(table[alive] == 0) | (self.content[table[alive]] != wanted)]
        name = self.config.groups[g].name
        self._expect(
            not wrong.size,
            f"after {start} tokens (prompt {running.prompt}) the next token reads entries {wrong[:4].tolist()} of "
            f"group {name!r}, which are given back or hold another prefix",
        )

    def _write_tokens(self, g: int, row: int, start: int, stop: int, *, skip_dead: bool = False) -> None:
        running, table, rule = self.rows[row], self._table(g, row), self.config.groups[g].lifetime
        entries = np.arange(start // rule.block, cdiv(stop, rule.block))
        if skip_dead:
            entries = alive_entries(rule, stop, stop, cdiv(stop, rule.block))
        blocks = table[entries]
        self._expect(
            blocks.all(), f"tokens {start} to {stop} of group {self.config.groups[g].name!r} have no block"
        )
        self.content[blocks] = self._prefix(g, running, np.minimum((entries + 1) * rule.block, stop))

    # --- laws ---

    def _expect(self, holds: Any, found: str) -> None:
        expect(bool(holds), self.spec, found)

    def _check_nulls(self, row: int) -> None:
        """What died before this step is the null block in the table."""
        running = self.rows[row]
        for g, rule in self._rules():
            if rule.recycles and not rule.state:
                held = self._table(g, row) != 0
                held[alive_entries(rule, running.computed, running.prompt, len(held))] = False
                dead = held.nonzero()[0][:4].tolist()
                text = f"entries {dead} are dead after {running.computed} tokens and still held"
                self._expect(not held.any(), text)

    def _balance(self) -> None:
        held = {
            block for row in self.rows for g, _ in self._rules() for block in self._table(g, row).tolist()
        } - {0}
        free, total = self.manager.num_free, self.config.num_blocks - 1
        self._expect(free + len(held) == total, f"{free} free and {len(held)} held blocks are not {total}")

    def _check_hit(self, running: _Running, hit: Hit) -> None:
        """The hit is what a search finds that tries every length from the longest on, entry by entry."""
        wanted = self._longest_hit(running)
        text = (
            f"a request of {len(running.tokens)} tokens hits {hit.tokens} tokens, a search by hand {wanted}"
        )
        self._expect(hit.tokens == wanted, text)

    def _longest_hit(self, running: _Running) -> int:
        cache, chain = self.manager.cache, running.request.chain
        if cache is None or not self.config.reads_cache:
            return 0
        digests = [bytes(chain.digests)[at : at + 32] for at in range(0, len(bytes(chain.digests)), 32)]
        step = self.config.alignment
        for length in range((len(running.tokens) - 1) // step * step, 0, -step):
            if all(
                cache.find(g, digests[(entry + 1) * rule.block // chain.unit - 1])
                for g, rule in self._rules()
                if rule.hits == "keyed"
                for entry in entries_that_a_hit_needs(rule, length)
            ):
                return length
        return 0
