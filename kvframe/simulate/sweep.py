"""Many cases: one after the other, in parallel processes, or on a Ray cluster; the results are the same."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from importlib import import_module
from typing import Any

from kvframe.errors import MissingDependencyError
from kvframe.simulate.case import Case, Result, run_case

Done = Callable[[int], None]


def _ignore(done: int) -> None:
    pass


def run_cases(
    cases: Sequence[Case],
    *,
    jobs: int = 1,
    ray: str | None = None,
    done: Done = _ignore,
    step: Done = _ignore,
) -> list[Result]:
    """Run cases; results are in the cases' order, whatever ran where.

    Args:
        cases: what to simulate.
        jobs: processes.
        ray: address of a Ray cluster to run on instead ("auto", "local", or ray://host:port).
        done: called with the number of cases that are finished.
        step: called with the requests of the running case that are done; only with one process.

    Raises:
        KVFrameError: a case cannot be planned.
        MissingDependencyError: a cluster is asked for, and ray is not installed.
    """
    if ray is not None:
        return _in_order(cases, _on_ray(cases, ray), done)
    if jobs == 1 or len(cases) == 1:
        return _in_order(cases, ((index, run_case(case, step)) for index, case in enumerate(cases)), done)
    return _in_order(cases, _in_processes(cases, jobs), done)


def _in_order(cases: Sequence[Case], results: Iterator[tuple[int, Result]], done: Done) -> list[Result]:
    found: dict[int, Result] = {}
    for index, result in results:
        found[index] = result
        done(len(found))
    return [found[index] for index in range(len(cases))]


def _in_processes(cases: Sequence[Case], jobs: int) -> Iterator[tuple[int, Result]]:
    # Spawned, so that a child inherits nothing but its case: the same everywhere.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(cases)), mp_context=context) as pool:
        waiting: dict[Future[Result], int] = {pool.submit(run_case, case): i for i, case in enumerate(cases)}
        try:
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()
        finally:
            for future in waiting:
                future.cancel()


def _on_ray(cases: Sequence[Case], address: str) -> Iterator[tuple[int, Result]]:
    try:
        cluster: Any = import_module("ray")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(module="kvframe simulate --ray", needs="ray", extra="ray") from error
    cluster.init(address=address)
    try:
        remote = cluster.remote(run_case)
        waiting = {remote.remote(case): index for index, case in enumerate(cases)}
        while waiting:
            (ready, *_), _ = cluster.wait(list(waiting))
            yield waiting.pop(ready), cluster.get(ready)
    finally:
        cluster.shutdown()
