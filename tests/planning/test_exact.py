"""The exact search against a slow planner that tries everything: all splits, all slab sizes, all blocks per slab."""

import itertools
import math
import random

import pytest

from kvframe import EngineConfig
from kvframe.planning import Limits, plan
from tests.planning.models import HOST, LENGTHS, alive, full, held_bytes, kinds_of, mix, peak, sliding

MODELS = 48


def random_case(seed):
    """A model of two or three kinds with small pages, and a pool of a few to a few hundred of its requests."""
    draw = random.Random(seed)
    alignment = draw.choice([16, 48, 64, 256])
    kinds = [full] + [sliding] * draw.choice([1, 1, 2])
    parts = []
    for number, kind in enumerate(kinds):
        values = {
            "num_kv_heads": 1,
            "head_size": draw.randint(1, 12),
            "block_stride_alignment": draw.choice([alignment, alignment, 16]),
        }
        if kind is sliding:
            values["window"] = 16 * draw.randint(1, 20) + number
        parts.append((draw.randint(1, 7), kind(**values)))
    specs = mix(*parts)
    length = draw.choice([16, 40, 256, 256, 2048])
    limits = EngineConfig(max_model_len=length, max_num_seqs=draw.choice([1, 8]))
    request = sum(alive(spec, limits, length) * spec.page_size_bytes for spec in specs.values())
    memory = int(request * draw.choice([2.5, 4, 10, 40]))
    share = draw.choice([0.02, 0.1, 0.3])
    slab = draw.choice([3000, 6000, 12000])
    return (
        specs,
        limits,
        memory,
        Limits(structural_share=share, slab_bytes=slab, groups=draw.choice([3, 4, 16])),
    )


def splits(count):
    """1, 2, 3 and the divisors, with more than three layers a group."""
    return [q for q in range(1, count + 1) if q == 1 or (count > 3 * q and (q <= 3 or count % q == 0))]


class BruteForce:
    """Cost and constraints as slabs.md states them, one plan at a time."""

    def __init__(self, specs, engine, memory, limits):
        self.specs, self.engine, self.memory, self.limits = specs, engine, memory, limits
        self.kinds = list(kinds_of(specs).values())
        self.firsts = [specs[layers[0]] for layers in self.kinds]
        self.lengths = sorted({min(n, engine.max_model_len) for n in LENGTHS})
        # The cost averages over the lengths; constraints hold for all five, in decode and at a request's peak.
        rows = [(n, alive) for n in self.lengths]
        rows += [(n, count) for n in LENGTHS for count in (alive, peak)]
        options = {"engine": engine, "memory": 1 << 40, "host": HOST, "strategy": "engine", "layout": "BLHNC"}
        theirs = plan(specs, **options).config
        self.blocks = [[count(spec, engine, n) for spec in self.firsts] for n, count in rows]
        self.ceiling = [held_bytes(theirs, engine, n, count) for n, count in rows]
        pages = [sum(specs[layer].page_size_bytes for layer in layers) for layers in self.kinds]
        self.natural = [sum(map(math.prod, zip(row, pages, strict=True))) for row in self.blocks]
        self.longest = [peak(spec, engine, engine.max_model_len) for spec in self.firsts]

    def best(self):
        """The least cost of any slab plan, infinite if there is none."""
        costs = [math.inf]
        for counts in itertools.product(*(splits(len(layers)) for layers in self.kinds)):
            if sum(counts) <= self.limits.groups:
                costs.append(self.best_of(counts))
        return min(costs)

    def best_of(self, counts):
        groups = [
            (kind, len(layers[index::count]) * self.firsts[kind].page_size_bytes)
            for kind, (layers, count) in enumerate(zip(self.kinds, counts, strict=True))
            for index in range(count)
        ]
        largest = min(self.limits.slab_bytes, self.memory // (2 * len(groups)))
        costs = [math.inf]
        for slab in range(16, largest + 1, 16):
            options = [self.blocks_per_slab(slab, kind, page) for kind, page in groups]
            owners = [kind for kind, _ in groups]
            costs += [self.cost(slab, owners, ks) for ks in itertools.product(*options)]
        return min(costs)

    def blocks_per_slab(self, slab, kind, page):
        """Every k that cuts the slab into aligned strides of at least a page."""
        step = self.firsts[kind].block_stride_alignment
        return [k for k in range(1, slab // page + 1) if slab % k == 0 and slab // k % step == 0]

    def cost(self, slab, owners, ks):
        """C of one plan, infinite if it breaks a constraint. `owners`: the kind of each group."""
        shares = []
        for blocks, ceiling, natural in zip(self.blocks, self.ceiling, self.natural, strict=True):
            held = sum(blocks[kind] * (slab // k) for kind, k in zip(owners, ks, strict=True))
            shares.append(1 - natural / held)
            if held > ceiling or shares[-1] > self.limits.structural_share + 1e-12:
                return math.inf
        slabs = 1 + sum(-(-self.longest[kind] // k) for kind, k in zip(owners, ks, strict=True))
        if slabs > self.memory // slab:
            return math.inf
        rows = self.engine.max_num_seqs
        entries = sum(rows * -(-self.engine.max_model_len // self.firsts[kind].block_size) for kind in owners)
        partly_used = sum(slab * (1 - 1 / k) for k in ks)
        mean = sum(shares[: len(self.lengths)]) / len(self.lengths)
        return mean + (slab + partly_used + 4 * entries) / self.memory + 5e-5 * len(owners)


@pytest.mark.parametrize("seed", range(MODELS))
def test_the_exact_search_agrees_with_trying_everything(seed):
    specs, engine, memory, limits = random_case(seed)
    made = plan(
        specs, engine=engine, memory=memory, host=HOST, layout="BLHNC", limits=limits, exact=True
    ).report
    chosen = next(other for other in made.alternatives if other.name == made.chosen)
    others = [
        other.cost
        for other in made.alternatives
        if not other.name.startswith("slabs") and other.fits and other.within_limits
    ]
    best = min([BruteForce(specs, engine, memory, limits).best(), *others])
    if best == math.inf:
        assert not chosen.within_limits  # the engines' plan, for want of another
    else:
        assert chosen.cost == pytest.approx(best, rel=1e-9)


def test_the_random_models_are_worth_comparing():
    """Slabs win in many of them, with groups split and with unequal k, and in some nothing is within the limits."""
    chosen = []
    for seed in range(MODELS):
        specs, engine, memory, limits = random_case(seed)
        options = {"engine": engine, "memory": memory, "host": HOST, "limits": limits, "exact": True}
        made = plan(specs, layout="BLHNC", **options)
        chosen.append((made.report.chosen, len(made.config.groups) > len(kinds_of(specs))))
    slabs = [split for name, split in chosen if name.startswith("slabs")]
    assert len(slabs) >= MODELS // 3
    assert len(slabs) < MODELS
    assert any(slabs)
