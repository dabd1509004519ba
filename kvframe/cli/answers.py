"""What else people ask about a plan, answered by planning again: other budgets, more requests, longer requests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import attrs

from kvframe.cli.plot import SweepPoint
from kvframe.cli.request import PlanRequest
from kvframe.errors import InsufficientMemoryError, UsageError
from kvframe.planning import Plan
from kvframe.planning.inverse import memory_for_requests
from kvframe.planning.sizing import exact_bound, largest_fitting_len

if TYPE_CHECKING:
    from rich.progress import Progress

SWEEP_STEPS = 16  # budgets from an eighth of the given one to twice it
WANTED = (1, 256)  # requests whose memory is told
LONGEST = 64  # times max_model_len: lengths beyond are not looked for

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Answers:
    """The answers, for requests as long as the plan's.

    Args:
        sweep: what other budgets give, the plan's own among them.
        memory_for: requests at once to the device's bytes that they need on one rank, or to why no bytes are enough.
        longest: tokens of the longest single request that this plan's pools can hold.
        longest_is_bound: the search stopped there, and longer requests may fit too.
    """

    sweep: tuple[SweepPoint, ...]
    memory_for: dict[int, int | str]
    longest: int
    longest_is_bound: bool


def answers(asked: PlanRequest, made: Plan) -> Answers:
    """Ask the planner about other budgets, numbers and lengths of requests; shows progress on a terminal."""
    memory, length = made.report.memory_bytes, made.report.max_model_len
    plan_at = functools.cache(lambda nbytes: asked.plan(nbytes, length))
    wanted = sorted({*WANTED, *filter(None, (asked.engine.max_num_seqs, asked.options["requests"]))})
    with _progress() as progress:
        task = progress.add_task("More plans for the report", total=SWEEP_STEPS + len(wanted))

        def told(answer: T) -> T:
            progress.advance(task)
            return answer

        budgets = [memory * step * 2 // SWEEP_STEPS for step in range(1, SWEEP_STEPS + 1)]
        sweep = tuple(told(_point(plan_at, budget)) for budget in budgets)
        memory_for = {count: told(_memory_for(asked, plan_at, count, length)) for count in wanted}
    longest = _longest(asked, made)
    return Answers(
        sweep=sweep, memory_for=memory_for, longest=longest, longest_is_bound=longest == LONGEST * length
    )


def _point(plan_at: Callable[[int], Plan], budget: int) -> SweepPoint:
    try:
        report = plan_at(budget).report
    except InsufficientMemoryError:
        return SweepPoint(memory_bytes=budget, requests=0.0, tokens=0)
    return SweepPoint(memory_bytes=budget, requests=report.max_concurrency or 0.0, tokens=report.tokens)


def _memory_for(asked: PlanRequest, plan_at: Callable[[int], Plan], count: int, length: int) -> int | str:
    try:
        return memory_for_requests(plan_at, count, lambda plan: asked.requests_by_pool(plan, length))
    except UsageError as error:
        return error.rule


def _longest(asked: PlanRequest, made: Plan) -> int:
    bound, longest = exact_bound(asked.host), LONGEST * made.report.max_model_len
    return min(
        largest_fitting_len(config.groups, asked.engine, bound, pools=config.pools.values(), longest=longest)
        for config in made.configs
    )


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)
