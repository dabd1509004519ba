"""A plain, slow model of an engine around the block manager: it keeps what every block holds and checks every law.

Content is tracked position by position: position p of a request holds the id of the prefix that ends with token p, so
two requests share content exactly where their tokens (and salts) are equal. Before each step everything that the step
reads must be there; what it writes is written. All in dicts and loops, sharing no code with the manager's arrays.
"""

from __future__ import annotations

import random
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvframe.blocks import (
    Admission,
    BlockConfig,
    BlockRequest,
    Deferred,
    ExtraKeys,
    GroupBlocks,
    KVCacheManager,
    Refused,
    Served,
    chunk_stops,
)
from kvframe.blocks.common import common_prefix
from kvframe.blocks.hashing import block_hash
from kvframe.blocks.pins import Pin
from kvframe.blocks.quotas import Quota, Quotas
from kvframe.blocks.resize import grow, shrink
from kvframe.blocks.snapshot import Restored, load, save
from kvframe.blocks.state import exported_position
from kvframe.blocks.tenants import TenantManager
from kvframe.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, PrefixIndex, Recorder
from kvframe.lifetime import Lifetime
from tests.blocks.lifetimes import Chunks, PromptAndWindow, States, Window

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a folder in memory, where syncing costs nothing


@attrs.define
class Running:
    """A request as the engine sees it."""

    request: BlockRequest
    tokens: list[int]
    prompt: int
    salt: str | None
    prefix: list[int]  # prefix[n]: id of the first n tokens
    computed: int
    flying: int = 0  # of these, not settled
    tag: int = 0
    state_at: dict[int, int] = attrs.field(factory=dict)  # group: the block that holds the running state


def lifetimes(random_: random.Random) -> list[Lifetime]:
    """One to three groups of random families."""
    block = random_.choice([2, 4])
    choices: list[Lifetime] = [
        Window(block=block, window=random_.choice([1, 3, 6, 9])),
        Window(block=2 * block, window=random_.choice([5, 8])),
        Window(block=block, window=5, slack=2),
        Chunks(block=block, chunk=random_.choice([4, 6, 8])),
        PromptAndWindow(block=block, window=random_.choice([3, 6])),
        Lifetime(block=2 * block),
        Lifetime(block=block),
        Lifetime(block=block, fixed=1, hits="free"),
        Window(block=block, window=6, hits="free"),
        States(block=random_.choice([block, 2 * block]), spare=random_.choice([0, 0, 2])),
        States(block=block, export=2),
        Lifetime(block=block, source="encoder", hits="never"),
        Lifetime(block=block, fixed=2, state=True, spare=1, hits="never"),
    ]
    first = random_.choice([Lifetime(block=block), random_.choice(choices)])
    return [first, *random_.sample(choices, random_.choice([0, 1, 1, 2]))]


def random_config(random_: random.Random) -> BlockConfig:
    """A configuration that the manager accepts."""
    rules = lifetimes(random_)
    keyed = [rule.block for rule in rules if rule.hits == "keyed"]
    caching = bool(keyed) and random_.random() < 0.9
    slabs = random_.random() < 0.35
    sparse = any(rule.hits == "keyed" and (rule.state or rule.thins) for rule in rules)
    base = BlockConfig(
        groups=[
            GroupBlocks(
                name=str(g),
                lifetime=rule,
                blocks_per_slab=random_.choice([1, 2, 3]) if slabs else 1,
                zeroed=True,
            )
            for g, rule in enumerate(rules)
        ],
        num_blocks=random_.choice([14, 30, 60]),
        max_model_len=64,
        max_requests=5,
        max_encoder_tokens=8,
        prefix_caching=caching,
        draft_drop=caching and random_.random() < 0.25,
        watermark=random_.choice([0.0, 0.0, 0.1]),
        eviction=random_.choice(["lru", "lru", "frequency"]),
        hash_name=random_.choice(["sha256", "sha256_cbor"]),
        pin_limit=random_.choice([0.25, 0.5]),
    )
    if caching and sparse:
        interval = random_.choice([None, None, 0, base.step_unit, 2 * base.step_unit])
        base = attrs.evolve(base, retention_interval=interval)
    if caching and random_.random() < 0.5:
        unit = random_.choice([u for u in (1, 2, base.hash_unit) if all(block % u == 0 for block in keyed)])
        base = attrs.evolve(base, hash_unit=unit)
    return base


class World:
    """The engine: requests under way, what every block holds, and the laws."""

    def __init__(self, config: BlockConfig, random_: random.Random, *, watched: bool = False) -> None:
        self.config, self.random = config, random_
        self.decoding = False
        self.index, self.salted, self.restored = PrefixIndex(), False, False
        self.pinned: dict[str, tuple[list[int], str | None]] = {}  # tokens, salt
        self.recorder = Recorder([self.hear]) if random_.random() < 0.4 or watched else None
        shares = [1.0, 0.7, 0.4, 0.2]
        self.quotas = None
        if random_.random() < 0.4:
            quotas = [Quota(running=random_.choice(shares), cached=random_.choice(shares)) for _ in range(2)]
            self.quotas = Quotas(default=quotas[0], named={"a": quotas[1]})
        self.salts: dict[bytes, str | None] = {}  # of every hash
        self.running: dict[str | None, float] = {}  # what tenants held after the operation before
        self.manager = self.new_manager()
        self.rows: dict[int, Running] = {}
        self.waiting: list[Running] = []
        self.content: dict[tuple[int, int], Any] = {}
        self.prefixes: dict[tuple[Any, int], int] = {}
        self.tags = 0
        self.evicted = random_.random() < 0.5  # else no key is ever taken from a held block
        self.lookahead = random_.choice([0, 0, 2])
        self.states = [g for g, group in enumerate(config.groups) if group.lifetime.state]
        self.keyed_states = [g for g in self.states if config.groups[g].lifetime.fixed is None]
        self.drafts = min([config.groups[g].lifetime.spare for g in self.states], default=2)

    def new_manager(self) -> KVCacheManager:
        if self.quotas is not None:
            return TenantManager(self.config, self.quotas, watcher=self.recorder)
        return KVCacheManager(self.config, watcher=self.recorder)

    def hear(self, batch: EventBatch) -> None:
        """What a router does with a batch; and a batch says no more than is so."""
        before = self.index.keys()
        assert self.index.apply(batch)
        assert self.index.complete
        for event in batch.events:
            if isinstance(event, BlockStored):
                if not event.token_ids and self.restored:
                    continue  # a snapshot knows hashes only
                assert len(event.block_hashes) * event.block_size == len(event.token_ids)
                self.check_stored(event)
        if not any(isinstance(event, AllBlocksCleared) for event in batch.events):
            gone = {
                (e.group_idx, h) for e in batch.events if isinstance(e, BlockRemoved) for h in e.block_hashes
            }
            came = {
                (e.group_idx, h) for e in batch.events if isinstance(e, BlockStored) for h in e.block_hashes
            }
            assert gone <= before | came

    def check_stored(self, event: BlockStored) -> None:
        """The hashes are those of the tokens, where a hash covers one block and nobody's salt."""
        unit = self.config.hash_unit
        hashing = block_hash(self.config.hash_name)
        parent = event.parent_block_hash or hashing.root
        for at, digest in enumerate(event.block_hashes):
            tokens = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
            for start in range(0, event.block_size, unit):
                parent = hashing.unit(parent, np.asarray(tokens[start : start + unit], np.uint32), None)
            # Only a prompt's first unit is salted: there alone the hash may be another, and the salt is told nobody.
            first = event.parent_block_hash is None and at == 0
            assert parent == digest or (first and self.salted), "a hash is not that of its tokens"
            assert event.extra_keys is None
            parent = digest

    # --- content ---

    def space(self, g: int) -> int:
        return 0 if self.config.uniform else g

    def prefix_ids(self, tokens: list[int], salt: str | None) -> list[int]:
        ids: list[Any] = [("root", salt)]
        for token in tokens:
            key = (ids[-1], token)
            ids.append(self.prefixes.setdefault(key, len(self.prefixes)))
        return ids

    def table(self, g: int, row: int) -> list[int]:
        return self.manager.tables.row(g, row).tolist()

    def write(self, row: int, start: int, stop: int, groups: list[int] | None = None) -> None:
        """Tokens [start, stop) are computed: their entries must be there, and get their content."""
        running = self.rows[row]
        for g, group in enumerate(self.config.groups):
            rule = group.lifetime
            if groups is not None and g not in groups:
                continue
            table = self.table(g, row)
            if rule.fixed is not None or rule.source == "encoder":
                continue
            if rule.state:
                block = running.state_at[g] = table[-1 - rule.spare]
                assert block, f"group {g}: no block for the state after {stop}"
                self.content[self.space(g), block] = (g, self.prefix_at(running, stop))
                continue
            for p in range(start, stop):
                block = table[p // rule.block]
                assert block, f"group {g}: position {p} has no block"
                cells = self.content.get((self.space(g), block))
                if not isinstance(cells, dict) or cells.get("group") != g:
                    cells = self.content[self.space(g), block] = {"group": g}
                cells[p % rule.block] = self.prefix_at(running, p + 1)

    def prefix_at(self, running: Running, n: int) -> Any:
        return running.prefix[n] if n < len(running.prefix) else ("draft", running.tag, n)

    def check_reads(self, row: int, start: int) -> None:
        """What a step from `start` on reads is there."""
        running = self.rows[row]
        for g, group in enumerate(self.config.groups):
            rule, table = group.lifetime, self.table(g, row)
            if rule.fixed is not None or rule.source == "encoder":
                for block in table:
                    assert self.content[self.space(g), block] == ("own", g, running.tag)
                continue
            lo, hi = rule.dead(start + rule.slack, running.prompt)
            if rule.state:
                if start:
                    assert running.state_at[g] in table, f"group {g} lost the running state"
                    assert self.content[self.space(g), running.state_at[g]] == (
                        g,
                        self.prefix_at(running, start),
                    )
                continue
            for p in range(start):
                entry = p // rule.block
                if lo <= entry < hi:
                    continue
                assert table[entry], f"group {g}: position {p} is read at {start} and gone"
                cells = self.content[self.space(g), table[entry]]
                assert cells["group"] == g
                assert cells[p % rule.block] == self.prefix_at(running, p + 1), f"group {g}, position {p}"

    def own_fixed(self, row: int) -> None:
        """Blocks for life belong to one request: mark them."""
        for g, group in enumerate(self.config.groups):
            if group.lifetime.fixed is not None or group.lifetime.source == "encoder":
                for block in self.table(g, row):
                    self.content[self.space(g), block] = ("own", g, self.rows[row].tag)

    def run_copies(self) -> None:
        for copy in self.manager.take_copies():
            space = self.space(copy.group)
            source = self.content.get((space, copy.source))
            self.content[space, copy.target] = dict(source) if isinstance(source, dict) else source

    # --- operations ---

    def prompt(self) -> list[int]:
        """Prompts share prefixes by construction: a few stems, cut somewhere, and a tail."""
        stem = [(self.random.randrange(3) * 7 + i) % 5 for i in range(self.random.choice([0, 8, 16, 24, 33]))]
        if self.random.random() < 0.7:
            stem = [i % 5 for i in range(len(stem))]
        return [*stem, *(self.random.randrange(2) for _ in range(self.random.randrange(1, 12)))]

    def admit(self) -> None:
        if self.waiting and self.random.random() < 0.7:
            running = self.waiting.pop(0)
        else:
            tokens, salt = self.prompt(), self.random.choice([None, None, None, "a", "b"])
            self.salted |= salt is not None
            request = self.manager.request(np.asarray(tokens, np.int32), extra=ExtraKeys(salt=salt))
            running = Running(request, tokens, len(tokens), salt, self.prefix_ids(tokens, salt), 0)
        if len(running.tokens) >= self.config.max_model_len:
            return
        self.tags += 1
        running.tag = self.tags
        hit = self.manager.lookup(running.request)
        self.check_hit(running, hit)
        total = hit.tokens
        external = 0
        if not self.keyed_states and self.random.random() < 0.1:
            external = self.random.randrange(len(running.tokens) - total)
        total += external
        chunk = self.random.randrange(1, len(running.tokens) - total + 1)
        end = chunk_stops(self.config, total, total + chunk, len(running.tokens), hit.junction)
        before = self.picture()
        (answer,) = self.manager.admit(
            [
                Admission(
                    request=running.request,
                    num_new_tokens=end - total,
                    lookahead=self.lookahead,
                    external_tokens=external,
                    encoder_tokens=5,
                    whole_must_fit=self.random.random() < 0.5,
                    hit=hit if self.random.random() < 0.5 else None,
                )
            ],
            busy=bool(self.rows),
        )
        if not isinstance(answer, Served):
            assert self.picture() == before
            if isinstance(answer, Refused):
                assert answer.missing > 0
            self.waiting.append(running)
            return
        assert answer.hit_tokens == hit.tokens
        row = answer.slot
        assert row not in self.rows
        self.rows[row] = running
        running.computed = end
        self.run_copies()
        self.own_fixed(row)
        running.state_at = {
            g: self.table(g, row)[-(-total // self.block(g)) - 1] for g in self.keyed_states if total
        }
        # What the cache does not serve is replayed by the engine, and what is external comes from elsewhere.
        free = [g for g, group in enumerate(self.config.groups) if group.lifetime.hits == "free"]
        self.write_alive(row, 0, hit.tokens, total, free)
        self.write_alive(row, hit.tokens, total, total)
        self.check_reads(row, total)
        self.finish_write(row, total, end, self.manager.take_fresh())

    def block(self, g: int) -> int:
        return self.config.groups[g].lifetime.block

    def finish_write(self, row: int, start: int, stop: int, fresh: list[list[int]]) -> None:
        """Write a chunk, and the state that the kernel exports inside it."""
        self.write(row, start, stop)
        running = self.rows[row]
        for g in self.keyed_states:
            position = exported_position(
                self.config, g, start, stop, max(running.prompt, len(running.tokens) - 1)
            )
            column = -(-stop // self.block(g)) - 2
            block = self.table(g, row)[column] if column >= 0 else 0
            if position and block in fresh[g]:
                self.content[self.space(g), block] = (g, running.prefix[position])

    def write_alive(
        self, row: int, start: int, stop: int, total: int, groups: list[int] | None = None
    ) -> None:
        """Content from elsewhere for the positions [start, stop) that are alive at `total`."""
        for g, group in enumerate(self.config.groups):
            rule = group.lifetime
            skipped = rule.fixed is not None or rule.source == "encoder" or rule.state
            if skipped or (groups is not None and g not in groups):
                continue
            lo, hi = rule.dead(total, total)
            for p in range(start, stop):
                if not lo <= p // rule.block < hi:
                    self.write(row, p, p + 1, [g])

    def step(self) -> None:
        """One step of all running requests, some left out; drafts and tokens in flight where the groups allow."""
        for row in list(self.rows):
            if len(self.rows[row].tokens) + 4 >= self.config.max_model_len:
                self.release(row)
        if not self.rows:
            self.manager.step(0)
            return
        self.make_known()
        count = max(self.rows) + 1
        new = [0] * count
        # All rows, a token each; mostly for some steps on end, as engines decode.
        decoding = self.decoding = self.random.random() < (0.8 if self.decoding else 0.3)
        for row, running in self.rows.items():
            new[row] = 1 if decoding else self.chunk(running)
        before = {row: [self.table(g, row) for g in range(len(self.config.groups))] for row in self.rows}
        flying = [self.rows[row].flying if row in self.rows else 0 for row in range(count)]
        if decoding:
            alike = {flying[row] for row in self.rows}
            waits = alike.pop() if len(alike) == 1 else np.asarray(flying)
            result = self.manager.step(count, 1, lookahead=self.lookahead, in_flight=waits)
        elif self.random.random() < 0.5:
            result = self.manager.step(
                count, np.asarray(new, np.int32), lookahead=self.lookahead, in_flight=np.asarray(flying)
            )
        else:
            slots = self.random.sample(list(self.rows), len(self.rows))
            result = self.manager.step(
                slots,
                np.asarray([new[row] for row in slots], np.int32),
                lookahead=self.lookahead,
                in_flight=np.asarray([flying[row] for row in slots]),
            )
        refused = {answer.slot for answer in result.refused}
        fresh = self.manager.take_fresh()
        assert all(new[row] for row in refused if row is not None)
        self.run_copies()
        for row in self.rows:
            if row in refused:
                self.check_refused(row, before[row])
            elif new[row]:
                self.check_nulls(row, flying[row])
                self.advance(row, new[row], fresh)
        if refused and self.random.random() < 0.8:
            self.preempt(max(row for row in refused if row is not None))

    def make_known(self) -> None:
        """Every request has at least one token that is known and not computed, or is let run ahead by one."""
        rows = sorted(row for row, running in self.rows.items() if running.computed >= len(running.tokens))
        if not rows:
            return
        tokens = [self.random.randrange(2) for _ in rows]
        style = self.random.random()
        if rows == list(range(len(rows))) and style < (0.9 if self.decoding else 0.3):
            self.manager.append(len(rows), np.asarray(tokens, np.int32))
        elif style < 0.6:
            self.manager.append(rows, np.asarray(tokens, np.int32))
        else:
            self.manager.append(rows, [[token] for token in tokens])
        for row, token in zip(rows, tokens, strict=True):
            self.know(self.rows[row], [token])

    def know(self, running: Running, tokens: list[int]) -> None:
        for token in tokens:
            running.tokens.append(token)
            key = (running.prefix[-1], token)
            running.prefix.append(self.prefixes.setdefault(key, len(self.prefixes)))

    def chunk(self, running: Running) -> int:
        left = len(running.tokens) - running.computed
        if self.random.random() < 0.15:
            return 0
        if left > 1:
            end = running.computed + self.random.randrange(1, left + 1)
            return (
                chunk_stops(self.config, running.computed, end, len(running.tokens), running.request.junction)
                - running.computed
            )
        return 1 + (self.drafts if self.random.random() < 0.4 else 0)

    def advance(self, row: int, new: int, fresh: list[list[int]]) -> None:
        running = self.rows[row]
        start, stop = running.computed, running.computed + new
        self.check_reads(row, start)
        self.finish_write(row, start, stop, fresh)
        running.computed = stop
        known = len(running.tokens)
        if stop > known:
            # Drafts: some are right, then one more token is known; the rest is rolled back.
            accepted = self.random.randrange(stop - known + 1)
            tokens = [self.random.randrange(2) for _ in range(accepted + 1)]
            self.know(running, tokens)
            self.manager.append([row], [tokens])
            final = known + accepted
            self.manager.commit([row], [final])
            running.computed = final
            tokens_only = [g for g in range(len(self.config.groups)) if g not in self.states]
            self.write(row, start, final, tokens_only)
            self.settle_states(row, start, stop, final)
            return
        running.flying = 0
        if not self.states and new == 1 and self.random.random() < 0.3:
            running.flying = 1

    def settle_states(self, row: int, start: int, stop: int, final: int) -> None:
        """Each draft's state has a block of its own behind the running one; a passed boundary's is put in place."""
        running = self.rows[row]
        for g in self.keyed_states:
            block, table = self.block(g), self.table(g, row)
            for j, position in enumerate(range(start + 1, stop + 1)):
                held = table[len(table) - 1 - self.config.groups[g].lifetime.spare + j]
                self.content[self.space(g), held] = (g, self.prefix_at(running, position))
                if position == final:
                    running.state_at[g] = held
            boundary = final // block * block
            if boundary > start and table[boundary // block - 1]:
                self.content[self.space(g), table[boundary // block - 1]] = (g, running.prefix[boundary])

    def release(self, row: int | None = None) -> None:
        if not self.rows:
            return
        row = self.random.choice(list(self.rows)) if row is None else row
        self.manager.release([row])
        del self.rows[row]

    def preempt(self, row: int | None = None) -> None:
        if not self.rows:
            return
        row = self.random.choice(list(self.rows)) if row is None else row
        running = self.rows.pop(row)
        (request,) = self.manager.preempt([row])
        assert request is running.request
        assert request.num_tokens == len(running.tokens)
        running.computed = running.flying = 0
        self.waiting.append(running)

    def fork(self) -> None:
        if not self.rows:
            return
        parent = self.random.choice(list(self.rows))
        before = self.picture()
        answer = self.manager.fork(parent)
        if not isinstance(answer, Served):
            assert self.picture() == before
            return
        twin = attrs.evolve(self.rows[parent])
        twin.tokens, twin.prefix = list(twin.tokens), list(twin.prefix)
        request = self.manager.ledger.requests[answer.slot]
        assert request is not None
        twin.request = request
        twin.state_at = {
            g: self.table(g, answer.slot)[self.table(g, parent).index(block)]
            for g, block in twin.state_at.items()
        }
        if not any(group.lifetime.source == "encoder" for group in self.config.groups):
            self.tags += 1
            twin.tag = self.tags
        self.rows[answer.slot] = twin
        self.run_copies()
        self.own_fixed(answer.slot)
        self.manager.take_fresh()

    def roll_back(self) -> None:
        if not self.rows or self.states:
            return
        row = self.random.choice(list(self.rows))
        running = self.rows[row]
        low = max(
            (self.lowest(rule.lifetime, running, g, row) for g, rule in enumerate(self.config.groups)),
            default=0,
        )
        if not self.evicted or running.flying or low > running.computed:
            return
        target = self.random.randrange(low, running.computed + 1)
        if target == 0:
            return
        self.manager.roll_back([row], [target])
        running.computed = target

    def lowest(self, rule: Lifetime, running: Running, g: int, row: int) -> int:
        """Fewest tokens at which everything that would be read is still there."""
        n = running.computed
        table = self.table(g, row)
        while n > 0 and rule.fixed is None and rule.source == "decoder":
            lo, hi = rule.dead(n - 1, running.prompt)
            if any(not table[entry] for entry in range(-(-(n - 1) // rule.block)) if not lo <= entry < hi):
                break
            n -= 1
        return n if rule.fixed is None and rule.source == "decoder" else 0

    def evict(self) -> None:
        if not self.evicted:
            return
        g = self.random.randrange(len(self.config.groups))
        end = self.config.num_blocks * (1 if self.config.uniform else self.config.groups[g].blocks_per_slab)
        self.manager.evict([self.random.randrange(1, end) for _ in range(3)] if end > 1 else [], group=g)

    def reset(self) -> None:
        if self.random.random() < 0.7:
            return
        if self.random.random() < 0.5:
            for row in list(self.rows):
                self.preempt(row)
        done = self.manager.reset()
        held = any(any(self.manager.pins[name].blocks) for name in self.pinned)
        assert done == (not self.rows and not held)
        if done:
            assert self.manager.num_keys == 0

    def pin(self) -> None:
        """Pin what is cached of some request's tokens; now and then one more token than it has."""
        known = [*self.rows.values(), *self.waiting]
        if not known or len(self.pinned) == 3:
            return
        running = self.random.choice(known)
        self.tags += 1
        request = self.manager.request(running.tokens, extra=ExtraKeys(salt=running.salt))
        before = self.picture()
        answer = self.manager.pins.pin(str(self.tags), request)
        limit = self.config.pin_limit * (self.config.num_blocks - 1) + 1e-9
        if not isinstance(answer, Pin):
            assert self.picture() == before
            assert answer == Deferred(reason="not_cached") or (
                isinstance(answer, Refused)
                and answer.reason in ("pin_limit", "tenant")
                and answer.missing > 0
            )
            return
        assert answer.tokens % self.config.step_unit == 0
        assert self.manager.pins.num_units <= limit
        self.pinned[str(self.tags)] = ([*running.tokens, 0], running.salt)

    def unpin(self) -> None:
        if self.pinned:
            name = self.random.choice(sorted(self.pinned))
            self.manager.pins.unpin(name)
            del self.pinned[name]

    def check_pins(self) -> None:
        """What is pinned is found, unless its keys were taken by name."""
        assert set(self.manager.pins) == self.pinned.keys()
        for name, (tokens, salt) in self.pinned.items() if not self.evicted else ():
            request = self.manager.request(tokens, extra=ExtraKeys(salt=salt))
            assert self.manager.lookup(request).tokens >= self.manager.pins[name].tokens

    def common(self) -> None:
        """What some running requests share, found by comparing token by token and entry by entry."""
        if not self.rows:
            return
        slots = self.random.sample(list(self.rows), self.random.randrange(1, len(self.rows) + 1))
        answer = common_prefix(self.manager, slots)
        rows = [self.rows[slot] for slot in slots]
        unit, hashed = self.config.hash_unit, min(len(row.request.chain.digests) // 32 for row in rows)
        same = 0
        while same < hashed and len({row.prefix[(same + 1) * unit] for row in rows}) == 1:
            same += 1
        assert answer.tokens == same * unit
        for g, entries in enumerate(answer.entries):
            tables = [self.table(g, slot) for slot in slots]
            shared = 0
            while (
                shared < min(map(len, tables)) and tables[0][shared] and len({t[shared] for t in tables}) == 1
            ):
                shared += 1
            assert entries == shared

    def grow(self) -> None:
        if self.config.num_blocks < 80:
            free = self.manager.num_free
            grow(self.manager, self.config.num_blocks + self.random.randrange(1, 8))
            added = self.manager.config.num_blocks - self.config.num_blocks
            self.config = self.manager.config
            assert self.manager.num_free == free + added

    def shrink(self) -> None:
        size = self.random.randrange(max(6, self.config.num_blocks - 12), self.config.num_blocks + 1)
        if size >= self.config.num_blocks:
            return
        before, keys = self.picture(), self.manager.num_keys
        answer = shrink(self.manager, size)
        assert self.picture() == before
        if isinstance(answer, Refused):
            assert answer.missing > 0
            assert self.manager.num_keys == keys
            return
        for move in answer.moves:
            space = self.space(move.group)
            content = self.content.get((space, move.source))
            self.content[space, move.target] = dict(content) if isinstance(content, dict) else content
        if self.random.random() < 0.2:
            return  # the engine thinks better of it
        self.check_tenants(always=True)  # before limits are lower
        moved = {(self.space(move.group), move.source): move.target for move in answer.moves}
        answer.commit()
        self.config = self.manager.config
        for running in self.rows.values():
            for g, block in running.state_at.items():
                running.state_at[g] = moved.get((self.space(g), block), block)
        for g, group in enumerate(self.config.groups):
            end = size * group.blocks_per_slab
            assert all(block < end for row in self.rows for block in self.table(g, row))

    def restart(self) -> None:
        """Save, kill, load, go on: what was cached is, and what ran waits."""
        cache = self.manager.cache
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            save(self.manager, Path(folder) / "snapshot", content="world")
            keys, order = self.servable(), [held for held in self.manager.pool.idle() if self.is_keyed(*held)]
            ran, self.rows = self.rows, {}
            self.restored = True
            self.manager = self.new_manager()
            answer = load(self.manager, Path(folder) / "snapshot", content="world")
        assert isinstance(answer, Restored)
        assert set(answer.pins) == self.pinned.keys()
        # What ran is cached now: that may be more than its tenant may have cached.
        assert self.servable() <= keys
        assert self.servable() == keys or (ran and self.quotas is not None)
        if not ran and cache is not None:
            assert self.manager.pool.idle() == order
        for running in (*ran.values(), *self.waiting):
            running.request = self.manager.request(
                np.asarray(running.tokens, np.int32),
                prompt=running.prompt,
                extra=ExtraKeys(salt=running.salt),
            )
            running.computed = running.flying = 0
        self.waiting += ran.values()

    def is_keyed(self, g: int, block: int) -> bool:
        return self.manager.cache is not None and block in self.manager.cache.index_of[g]

    # --- laws ---

    def picture(self) -> Any:
        """All that a refusal must leave as it is."""
        tables = [[self.table(g, row) for g in range(len(self.config.groups))] for row in self.rows]
        return tables, self.manager.num_free, self.manager.pool.num_held

    def check_refused(self, row: int, before: list[list[int]]) -> None:
        running = self.rows[row]
        for g, group in enumerate(self.config.groups):
            lo, hi = group.lifetime.dead(running.computed - running.flying, running.prompt)
            for entry, (was, now) in enumerate(zip(before[g], self.table(g, row), strict=True)):
                assert now == was or (now == 0 and lo <= entry < hi)
        self.check_reads(row, running.computed)

    def check_nulls(self, row: int, flying: int) -> None:
        """What is dead is the null block in the same step."""
        running = self.rows[row]
        for g, group in enumerate(self.config.groups):
            if group.lifetime.fixed is None and group.lifetime.source == "decoder":
                lo, hi = group.lifetime.dead(max(0, running.computed - flying), running.prompt)
                assert not any(self.table(g, row)[int(lo) : int(hi)])

    def check_hit(self, running: Running, hit: Any) -> None:
        """The longest hit by its definition, tried length by length; and every block of it holds these tokens."""
        assert hit.tokens == self.slow_hit(running)
        assert hit.tokens < len(running.tokens) or not hit.tokens
        for g, group in enumerate(self.config.groups):
            rule = group.lifetime
            for entry, block in enumerate(hit.blocks[g] if hit.tokens else []):
                if not block:
                    continue
                held = self.content[self.space(g), block]
                if rule.state:
                    pending = (g, block) in self.manager._notes.keyed_now
                    assert pending or held == (g, running.prefix[hit.tokens])
                    continue
                assert held["group"] == g
                for p in range(entry * rule.block, min((entry + 1) * rule.block, hit.tokens)):
                    assert held[p % rule.block] == running.prefix[p + 1]

    def slow_hit(self, running: Running) -> int:
        config = self.config
        cache, chain = self.manager.cache, running.request.chain
        if cache is None or any(group.lifetime.hits == "never" for group in config.groups):
            return 0
        unit = config.hash_unit

        def key(g: int, tokens: int) -> bool:
            at = tokens // unit * 32
            return at <= len(chain.digests) and bool(cache.find(g, bytes(chain.digests[at - 32 : at])))

        def valid(length: int) -> bool:
            for g in config.keyed:
                rule, drop = config.groups[g].lifetime, config.drop_unit(g)
                if length + drop > len(chain.digests) // 32 * unit:
                    return False
                if rule.state:
                    if not key(g, length):
                        return False
                    continue
                lo, hi = rule.dead(length + rule.slack, length)
                for entry in range(-(-(length + drop) // rule.block)):
                    end = (entry + 1) * rule.block
                    reach = min(end, length + drop)
                    if not lo <= entry < hi and not any(
                        key(g, at) for at in range(-(-reach // unit) * unit, end + 1, unit)
                    ):
                        return False
            return True

        for length in range(
            (len(running.tokens) - 1) // config.alignment * config.alignment, 0, -config.alignment
        ):
            if valid(length):
                return length
        return 0

    def check(self) -> None:
        """free + used + cached = total; every reference has a holder; nothing is held twice by accident."""
        holders: dict[tuple[int, int], int] = {}
        for row in self.rows:
            for g in range(len(self.config.groups)):
                for block in self.table(g, row):
                    if block:
                        holders[self.space(g), block] = holders.get((self.space(g), block), 0) + 1
        for name in self.pinned:
            for g, blocks in enumerate(self.manager.pins[name].blocks):
                for block in blocks:
                    holders[self.space(g), block] = holders.get((self.space(g), block), 0) + 1
        pool = self.manager.pool
        refs = [pool.refs] if self.config.uniform else list(pool.refs)
        counted = {
            (space, int(b)): int(array[b]) for space, array in enumerate(refs) for b in array.nonzero()[0]
        }
        assert counted == holders
        assert pool.num_held == len(holders)
        if self.config.uniform:
            order = pool.in_order()
            assert len(order) == len(set(order)) == pool.num_free
            assert not set(order) & {block for _, block in holders}
            assert pool.num_free + len(holders) == self.config.num_blocks - 1
        else:
            self.check_slabs(holders)
        self.check_published()
        self.check_pins()
        self.check_tenants()
        for row, running in self.rows.items():
            assert self.manager.ledger.computed[row] == running.computed
            assert self.manager.ledger.known[row] == len(running.tokens)
        if self.recorder is not None:
            self.recorder.publish()
            assert self.index.keys() == self.servable()

    def servable(self) -> set[tuple[int, bytes]]:
        """Every key of the prefix cache, looked up one by one; none where hits are forbidden."""
        cache = self.manager.cache
        if cache is None or not self.config.reads_cache:
            return set()
        keys = {
            (g, digest)
            for g in self.config.keyed
            for index in [cache.index_of[g]]
            for block in range(len(index._group))
            if block in index and index.group(block) == g
            for digest in [index.digest(block)]
        }
        keys |= set(cache._holders)
        assert all(cache.find(*key) for key in keys)
        assert len(keys) == self.manager.num_keys
        return keys

    def check_tenants(self, *, always: bool = False) -> None:
        """What tenants hold and have cached, counted block by block; and that they keep to their quotas."""
        if not isinstance(self.manager, TenantManager):
            return
        for running in (*self.rows.values(), *self.waiting):
            digests = running.request.chain.digests
            self.salts.update(
                dict.fromkeys(
                    [bytes(digests[at : at + 32]) for at in range(0, len(digests), 32)], running.salt
                )
            )
        if self.random.random() < 0.6 and not always:
            return  # asking settles the accounts, which mostly are not settled after each operation
        usage = self.manager.usage()  # first: what is over the limit goes when it is noticed
        quotas, cache = self.manager.quotas, self.manager.cache
        cuts = [group.blocks_per_slab for group in self.config.groups]
        holds: dict[str | None, set[tuple[int, int]]] = {}
        for row, running in self.rows.items():
            for g in range(len(cuts)):
                holds.setdefault(running.salt, set()).update(
                    (self.space(g), b) for b in self.table(g, row) if b
                )
        for name, (_, salt) in self.pinned.items():
            for g, blocks in enumerate(self.manager.pins[name].blocks):
                holds.setdefault(salt, set()).update((self.space(g), b) for b in blocks)
        cached: dict[str | None, Fraction] = {}
        for g, block in self.manager.pool.idle():
            if cache is not None and block in cache.index_of[g]:
                salt = self.salts[cache.index_of[g].digest(block)]
                cached[salt] = cached.get(salt, Fraction()) + Fraction(1, cuts[g])
        most = self.config.num_blocks - 1
        assert {salt for salt, blocks in holds.items() if blocks} | cached.keys() <= usage.keys()
        for salt, used in usage.items():
            held = sum(Fraction(1, cuts[space]) for space, _ in holds.get(salt, ()))
            assert used.running == float(held), f"tenant {salt}"
            assert used.cached == float(cached.get(salt, 0)), f"tenant {salt}"
            assert used.cached <= quotas.of(salt).cached * most + 1e-9
            assert used.running <= max(quotas.of(salt).running * most + 1e-9, self.running.get(salt, 0.0))
            self.running[salt] = used.running

    def check_published(self) -> None:
        """Where everything is published, every full entry has a key, unless keys were taken."""
        cache = self.manager.cache
        if cache is None or self.evicted:
            return
        for g in self.config.keyed:
            rule, publishing = self.config.groups[g].lifetime, self.manager._ops.rules[g].publishing
            if publishing is None or not publishing.plain:
                continue
            for row, running in self.rows.items():
                full = min(running.computed, len(running.tokens)) // rule.block
                assert all(not block or block in cache.index_of[g] for block in self.table(g, row)[:full])

    def check_slabs(self, holders: dict[tuple[int, int], int]) -> None:
        pool = self.manager.pool
        used: dict[int, set[int]] = {}
        for g, block in holders:
            used.setdefault(block // self.config.groups[g].blocks_per_slab, set()).add(g)
        assert all(len(owners) == 1 for owners in used.values()), "a slab serves two groups"
        assert pool.num_free == self.config.num_blocks - len(set(used) | {0})
        for g, group in enumerate(self.config.groups):
            rest = sum(
                1
                for slab in set(used) | {0}
                if pool._owner[slab] == g
                for block in range(slab * group.blocks_per_slab, (slab + 1) * group.blocks_per_slab)
                if (g, block) not in holders
            )
            reserved = -(-group.blocks_per_slab // min(pool.blocks_per_slab)) if pool._owner[0] == g else 0
            assert pool.free_for(g) == rest - reserved + pool.num_free * group.blocks_per_slab


OPERATIONS = (
    *["admit"] * 4,
    *["step"] * 7,
    *("release", "preempt", "fork", "roll_back", "evict", "reset"),
    *("pin", "unpin", "common", "grow", "shrink", "restart"),
)
