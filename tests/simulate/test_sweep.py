"""Sweeps: the same results in one process, in several, and on a (pretended) Ray cluster."""

import sys
from types import SimpleNamespace

import pytest

from kvframe.errors import InsufficientMemoryError, MissingDependencyError
from kvframe.simulate import Arrival, run_cases
from tests.simulate.models import tiny

STREAM = [Arrival(prompt=5 + i, output=6, prefix=((f"d{i % 2}", 5),)) for i in range(8)]
CASES = [tiny(*STREAM, blocks=blocks, name={"blocks": blocks}) for blocks in (16, 20, 40)]


def test_two_processes_give_the_results_of_one():
    counted = []
    alone = run_cases(CASES, jobs=1)
    together = run_cases(CASES, jobs=2, done=counted.append)
    assert alone == together
    assert [result.name["blocks"] for result in together] == [16, 20, 40]
    assert counted == [1, 2, 3]


def test_an_error_of_a_case_arrives_whole():
    with pytest.raises(InsufficientMemoryError):
        run_cases([*CASES, tiny(*STREAM, blocks=2)], jobs=2)


def test_steps_are_told_while_a_case_runs_alone():
    seen = []
    run_cases(CASES[:1], step=seen.append)
    assert seen[-1] == len(STREAM)
    assert seen == sorted(seen)


class Task:
    """Stands for a result that is still to come."""

    def __init__(self, value):
        self.value = value


class FakeRay:
    """What is asked of ray: tasks run at once, and are ready in another order than they were sent."""

    def __init__(self):
        self.address, self.down = None, False

    def init(self, address):
        self.address = address

    def shutdown(self):
        self.down = True

    def remote(self, function):
        return SimpleNamespace(remote=lambda case: Task(function(case)))

    def wait(self, tasks):
        return tasks[-1:], tasks[:-1]

    def get(self, task):
        return task.value


def test_a_cluster_gives_the_same_results(monkeypatch):
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert run_cases(CASES, ray="ray://head:10001") == run_cases(CASES)
    assert (ray.address, ray.down) == ("ray://head:10001", True)


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'kvframe\[ray\]'"):
        run_cases(CASES, ray="auto")
