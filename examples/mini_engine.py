"""A whole serving engine on the CPU: continuous batching over a paged KV cache, for any installed family.

It finds the plugins, plans, allocates, schedules with the block manager, preempts when blocks run out, and serves the
small random model of `mini_model.py`. No line of it names a kind of cache.
"""

import json
import math
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import attrs
import click
import numpy as np
import torch
from mini_model import FULL, MAX_LEN, WORDS, AliveMask, Layer, codec, embed, example_spec, logits, normed
from rich.live import Live
from rich.table import Table

import kvframe
from kvframe import ops
from kvframe.blocks import Admission, KVCacheManager, Refused, Served, block_config, chunk_stops
from kvframe.buffers import allocate
from kvframe.cli.options import parse_size, size_text
from kvframe.errors import KVFrameError, UsageError
from kvframe.views import create_kv_cache_views, make_views

CHUNK, MAX_SEQS = 24, 8  # tokens of a request in a step, requests at once


@attrs.define(eq=False)
class Request:
    """A request: its prompt, how many tokens it wants, its tokens, and what became of it."""

    prompt: list[int]
    wanted: int
    tokens: list[int]
    blocks: Any
    slot: int = -1
    computed: int = 0
    hit_tokens: int = 0
    preemptions: int = 0


@attrs.frozen
class Span:
    """The tokens [start, stop) of a request in this step."""

    request: Request
    start: int
    stop: int


class MiniEngine:
    """A full-attention layer between two of a family: plan, buffers, block manager, scheduler and model.

    Args:
        family: name of an installed family.
        example: which of its example specs.
        room: bytes of memory for the cache; below 1,000 it counts requests of the longest length.
        host: the PluginHost; None: what is installed.
    """

    def __init__(self, family: str, example: int = 0, room: int = 4, host: Any = None) -> None:
        self.host = host = host or kvframe.load_plugins()
        own = example_spec(host, family, example)
        specs = {"layers.0": own, "layers.1": FULL, "layers.2": own}
        rules = [host.family(spec).lifetime(spec) for spec in specs.values()]
        mode = "align" if any(rule.state for rule in rules) else "none"
        lengths = {"max_model_len": MAX_LEN, "max_in_flight_tokens": CHUNK, "max_encoder_tokens": MAX_LEN}
        limits = kvframe.EngineConfig(**lengths, state_cache_mode=mode)
        kept = {name: spec for name, spec in specs.items() if host.family(spec).lifetime(spec).fixed != 0}
        if room < 1000:
            wide = kvframe.plan(kept, engine=limits, memory=1 << 34, host=host).report
            slabs = math.ceil(room * wide.slabs_per_request) + len(
                wide.groups
            )  # each group's last may be half used
            room = (slabs + 1) * wide.pool_block_bytes
        self.config = kvframe.plan(kept, engine=limits, memory=room, host=host).config
        # a plan may have given a layer larger blocks than its spec asked for
        specs |= {name: spec for group in self.config.groups for name, spec in group.layer_specs.items()}
        self.layers = {
            name: Layer(spec, host.family(spec).lifetime(spec), 100 * i)
            for i, (name, spec) in enumerate(specs.items(), 1)
        }
        self.manager = KVCacheManager(block_config(self.config, limits, host=host, max_requests=MAX_SEQS))
        self._lay_out()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished: list[Request] = []
        self.steps = self.most_running = 0

    def _lay_out(self) -> None:
        """Buffers, the families' views over them, and each layer's cells as the reference operations take them."""
        host, config = self.host, self.config
        raw = {name: allocate(host, name, pool.size_bytes).tensor for name, pool in config.pools.items()}
        self.views, self.caches = make_views(host, config, raw), {}
        for tensor in config.tensors:
            layer = self.layers[tensor.layers[0]]
            layout = host.layouts.get(config.pools[tensor.pool].layout)
            where = (raw[tensor.pool], layer.spec, config.num_blocks_of(tensor), layout, tensor)
            for name, cells in zip(tensor.layers, create_kv_cache_views(*where), strict=True):
                if not layer.spec.has_layer_views:
                    shape = (1, layer.cells.num_states, layer.cells.state_content_size_bytes)
                    cells = self.views[name]["pages"][:, : math.prod(shape)].unflatten(1, shape)
                self.caches[name] = ops.layer_cache(cells, codec(host, layer))
        self.group_of = {name: g for g, group in enumerate(config.groups) for name in group.layer_specs}
        self.group_caches = [[self.caches[name] for name in group.layer_specs] for group in config.groups]

    def add(self, prompt: Sequence[int], wanted: int) -> Request:
        """A new request for `wanted` tokens after the prompt."""
        self.waiting.append(Request(list(prompt), wanted, list(prompt), self.manager.request(prompt)))
        return self.waiting[-1]

    def step(self) -> None:
        """Room for what runs, then for what waits; the worker's zeroing and copies; the model; the new tokens."""
        work = self._grow() + self._admit()
        for g, fresh in enumerate(self.manager.take_fresh()):
            ops.zero_blocks(self.group_caches[g], torch.tensor(fresh, dtype=torch.long))
        for one in self.manager.take_copies():
            caches = self.group_caches[one.group]
            ops.copy_blocks(caches, caches, torch.tensor([[one.source, one.target]]))
        self.steps, self.most_running = self.steps + 1, max(self.most_running, len(self.running))
        if work:
            self._note(work, self._forward(work))

    def _span(self, request: Request, start: int, junction: int) -> Span:
        """The next tokens: at most CHUNK, and to where a state is kept or an entry ends that a hit would not bring."""
        known = len(request.tokens)
        ends = [(start // rule.block + 1) * rule.block for rule in self._rules() if rule.hits == "free"]
        stop = min(start + CHUNK, known, *ends)
        if stop - start > 1:
            stop = chunk_stops(self.manager.config, start, stop, known, junction)
        return Span(request, start, stop)

    def _rules(self) -> list[kvframe.Lifetime]:
        return [layer.lifetime for layer in self.layers.values() if layer.lifetime.fixed != 0]

    def _grow(self) -> list[Span]:
        """The next tokens of all that run. Of those that get no block the last is preempted, until the rest fit."""
        work = {one.slot: self._span(one, one.computed, one.blocks.junction) for one in self.running}
        asked, starts = list(work), True
        while True:
            counts = np.array([work[slot].stop - work[slot].start for slot in asked], np.int32)
            *asked, last = [one.slot for one in self.manager.step(asked, counts, starts=starts).refused] or [
                None
            ]
            if last is None:
                return list(work.values())
            starts, victim = False, work.pop(last).request
            (victim.blocks,) = self.manager.preempt([last])
            victim.computed, victim.preemptions = 0, victim.preemptions + 1
            self.running.remove(victim)
            self.waiting.appendleft(victim)

    def _admit(self) -> list[Span]:
        """The first chunks of waiting requests after their prefix hits, in order, as far as blocks go."""
        work: list[Span] = []
        while self.waiting:
            one = self.waiting[0]
            hit = self.manager.lookup(one.blocks)
            span = self._span(one, hit.tokens, hit.junction)
            count, encoder = span.stop - span.start, len(one.prompt)
            ask = Admission(request=one.blocks, num_new_tokens=count, encoder_tokens=encoder, hit=hit)
            (answer,) = self.manager.admit([ask], busy=bool(self.running))
            if isinstance(answer, Refused) and not self.running:
                raise UsageError(option="--room", value=None, rule=f"{answer.missing} blocks are lacking")
            if not isinstance(answer, Served):
                break
            one.slot, one.hit_tokens = answer.slot, one.hit_tokens + answer.hit_tokens
            self.running.append(self.waiting.popleft())
            work.append(span)
        return work

    def _note(self, work: list[Span], scores: torch.Tensor) -> None:
        """New tokens for requests whose last known token was computed; those that have enough leave."""
        ready = {}
        for span, token in zip(work, scores.argmax(-1).tolist(), strict=True):
            span.request.computed = span.stop
            if span.stop == len(span.request.tokens):
                span.request.tokens.append(token)
                ready[span.request.slot] = token
        self.manager.append(list(ready), list(ready.values()))
        done = [one for one in self.running if len(one.tokens) == len(one.prompt) + one.wanted]
        self.manager.release([one.slot for one in done])
        self.running = [one for one in self.running if one not in done]
        self.finished += done

    def _forward(self, work: list[Span]) -> torch.Tensor:
        """The scores [requests, WORDS] after each span's last token."""
        x = _embedded(work)
        for name, layer in self.layers.items():
            inputs = normed(x)
            if layer.lifetime.fixed == 0:  # it keeps nothing: a token sees itself
                key, value = layer.key_value(inputs)
                out = layer.output((key if value is None else value).repeat_interleave(2, 1))
            else:
                tables = self.manager.tables.tables[self.group_of[name]][[span.request.slot for span in work]]
                out = (self._run if layer.is_state else self._attend)(name, layer, inputs, work, tables)
            x = x + out
        return logits(x[torch.tensor([span.stop - span.start for span in work]).cumsum(0) - 1])

    def _run(self, name: str, layer: Layer, x: torch.Tensor, work: list[Span], tables: Any) -> torch.Tensor:
        """Each span from the state before it to the one after it, which may lie in another block."""
        rule, out, rest = layer.lifetime, [], iter(x)
        for row, span in enumerate(work):
            before, after = (0 if rule.fixed else (at - 1) // rule.block for at in (span.start, span.stop))
            states = {part: view[tables[row, after]] for part, view in self.views[name].items()}
            for part, view in self.views[name].items():
                states[part].copy_(view[tables[row, before]].clone() if span.start else torch.zeros(()))
            out += [layer.advance(states, next(rest)) for _ in range(span.start, span.stop)]
        return torch.stack(out)

    def _attend(
        self, name: str, layer: Layer, x: torch.Tensor, work: list[Span], tables: Any
    ) -> torch.Tensor:
        """Write the step's keys and values to their slots, then attend to what the tables name."""
        rule, cells, tables = layer.lifetime, layer.cells, torch.from_numpy(tables).long()
        tokens = ops.TokenMap(block=cells.block_size, states=cells.num_states, ring=rule.fixed)
        starts, stops = torch.tensor([(span.start, span.stop) for span in work]).unbind(1)
        prompts = np.array([len(span.request.prompt) for span in work])
        mask, lengths = AliveMask(lifetime=rule, prompts=prompts), stops
        written, inputs = list(enumerate(work)), x
        if rule.source == "encoder":  # its output stands for the prompt, and is written once
            written = [(i, attrs.evolve(one, stop=prompts[i])) for i, one in written if one.start == 0]
            inputs, lengths = normed(_embedded([one for _, one in written])), torch.from_numpy(prompts)
            mask = ops.Mask(causal=False)
        places = [(row, at) for row, span in written for at in range(span.start, span.stop)]
        rows, positions = torch.tensor(places, dtype=torch.long).view(-1, 2).unbind(1)
        ops.write_kv(
            self.caches[name], ops.slot_mapping(tokens, tables, rows, positions), *layer.key_value(inputs)
        )
        if rule.hits == "free":  # a token reads its own entry alone: a hit brings none before it
            tables = tables.gather(1, tokens.block_index(starts)[:, None])
            mask, lengths = ops.Mask(), (stops - 1) % tokens.block + 1
        attended = ops.paged_attention(
            layer.query(x),
            self.caches[name],
            attrs.evolve(tokens, ring=None),
            tables,
            lengths=lengths,
            mask=mask,
            query_starts=torch.cat((torch.zeros(1, dtype=torch.long), (stops - starts).cumsum(0))),
            max_query_len=int((stops - starts).max()),
            scale=cells.head_size**-0.5,
        )
        return layer.output(attended)


def _embedded(spans: Sequence[Span]) -> torch.Tensor:
    tokens = [token for span in spans for token in span.request.tokens[span.start : span.stop]]
    return embed(tokens, [at for span in spans for at in range(span.start, span.stop)])


def pool_table(engine: MiniEngine, family: str) -> Table:
    """Who holds the pool: a row for each group of layers."""
    pool, blocks = engine.config.pools["device"], engine.manager.block_ids
    running, waiting, done = len(engine.running), len(engine.waiting), len(engine.finished)
    preempted = sum(one.preemptions for one in (*engine.running, *engine.waiting, *engine.finished))
    told = f"step {engine.steps}: {running} running, {waiting} waiting, {done} done, {preempted} preemptions"
    held = f"{engine.manager.pool.num_held:,} blocks held in {pool.num_slabs} slabs of {size_text(pool.slab_bytes)}"
    table = Table("group", "layers", "tokens/block", "blocks held", title=f"{family}, {told}", caption=held)
    for g, group in enumerate(engine.manager.config.groups):
        ids = {block for one in engine.running for block in blocks(one.slot)[g]} - {0}
        layers = len(engine.config.groups[g].layer_specs)
        table.add_row(group.name, str(layers), str(group.lifetime.block), f"{len(ids):,}")
    return table


@click.command(epilog="Examples:  mini_engine.py mla   mini_engine.py sliding_window --room 1 --json")
@click.argument("family")
@click.option("--example", default=0, help="Which of the family's example specs, from 0.")
@click.option("--room", default="2", help="For the cache: a size such as 64MiB, or a number of requests.")
@click.option("--requests", default=8, help="How many requests to serve; all begin alike.")
@click.option("--json", "as_json", is_flag=True, help="Print the requests as JSON when all are done.")
def main(family: str, example: int, room: str, requests: int, as_json: bool) -> None:
    """Serve random prompts by a small model with layers of FAMILY."""
    words = random.Random(0)
    stem, *rest = ([words.randrange(WORDS) for _ in range(40)] for _ in range(requests + 1))
    try:
        engine = MiniEngine(family, example, parse_size(room))
        asked = [engine.add(stem + own[:20], 60) for own in rest]
        with Live(get_renderable=lambda: pool_table(engine, family), transient=as_json) as live:
            while engine.waiting or engine.running:
                engine.step()
                live.refresh()
    except KVFrameError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        served = [{"tokens": r.tokens, "hit": r.hit_tokens, "preempted": r.preemptions} for r in asked]
        click.echo(json.dumps({"family": family, "steps": engine.steps, "requests": served}))


if __name__ == "__main__":
    main()
