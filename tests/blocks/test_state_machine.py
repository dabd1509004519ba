"""Random operations on random groups of every family against the plain model of `world`: all laws after each one."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvframe.blocks import keying, pool, prefix, queues, rowops, stepping
from kvframe.errors import SpecError
from tests.blocks.world import OPERATIONS, World, random_config

STEPS = int(os.environ.get("KVFRAME_BLOCK_STEPS", "12000"))
LENGTH = 60  # operations of one run
PARTS = max(1, STEPS // 50_000)  # so that several processes may share a long run


class BlockManagerMachine(RuleBasedStateMachine):
    """Each rule is one operation of the engine; its details come from the run's seed."""

    @initialize(seed=st.integers(0, 2**32 - 1))
    def start(self, seed: int) -> None:
        choices = random.Random(seed)
        try:
            config = random_config(choices)
        except SpecError:  # the draw contradicts itself, and is refused as it should be
            assume(False)
        self.world = World(config, choices)

    @rule()
    def admit(self) -> None:
        self.world.admit()

    @rule()
    def admit_more(self) -> None:
        self.world.admit()

    @rule()
    def step(self) -> None:
        self.world.step()

    @rule()
    def step_twice(self) -> None:
        self.world.step()
        self.world.check()
        self.world.step()

    @rule()
    def release(self) -> None:
        self.world.release()

    @rule()
    def preempt(self) -> None:
        self.world.preempt()

    @rule()
    def fork(self) -> None:
        self.world.fork()

    @rule()
    def roll_back(self) -> None:
        self.world.roll_back()

    @rule()
    def evict(self) -> None:
        self.world.evict()

    @rule()
    def reset(self) -> None:
        self.world.reset()

    @rule()
    def pin(self) -> None:
        self.world.pin()

    @rule()
    def unpin(self) -> None:
        self.world.unpin()

    @rule()
    def common(self) -> None:
        self.world.common()

    @rule()
    def grow(self) -> None:
        self.world.grow()

    @rule()
    def shrink(self) -> None:
        self.world.shrink()

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @invariant()
    def laws(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


@pytest.mark.parametrize("part", range(PARTS))
def test_state_machine(part: int) -> None:
    """STEPS operations: 12,000 in the usual run, a million with KVFRAME_BLOCK_STEPS=1000000."""
    run_state_machine_as_test(
        BlockManagerMachine,
        settings=settings(
            max_examples=max(1, STEPS // PARTS // LENGTH),
            stateful_step_count=LENGTH,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("seed", range(25))
def test_what_is_done_for_many_at_once_keeps_the_laws_for_few(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same operations with loops over single blocks switched off, so that arrays do everything."""
    for module in (keying, pool, prefix, queues, rowops, stepping):
        monkeypatch.setattr(module, "FEW", 0)
    choices = random.Random(seed)
    try:
        world = World(random_config(choices), choices)
    except SpecError:
        return
    for _ in range(80):
        getattr(world, choices.choice(OPERATIONS))()
        world.check()
