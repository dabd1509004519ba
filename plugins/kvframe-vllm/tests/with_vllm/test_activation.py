"""What `KVFRAME_VLLM` switches on, in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.config.scheduler import SchedulerConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core

import kvframe_vllm
from kvframe_vllm import activation
from kvframe_vllm.errors import SettingError, VersionError


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("KVFRAME_VLLM", "KVFRAME_VLLM_STRATEGY", "KVFRAME_VLLM_ANY_VERSION"):
        monkeypatch.delenv(name, raising=False)
    activation.deactivate()
    yield
    activation.deactivate()


def chosen(asynchronous: bool = False) -> type:
    config = SchedulerConfig(max_model_len=64, is_encoder_decoder=False, async_scheduling=asynchronous)
    return config.get_scheduler_cls()


def test_nothing_changes_unless_asked_for() -> None:
    planner, choose = core.get_kv_cache_configs, SchedulerConfig.get_scheduler_cls
    kvframe_vllm.register()
    assert core.get_kv_cache_configs is planner
    assert SchedulerConfig.get_scheduler_cls is choose
    assert chosen() is Scheduler


def test_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = core.get_kv_cache_configs
    monkeypatch.setenv("KVFRAME_VLLM", "manager")
    kvframe_vllm.register()
    assert chosen() is kvframe_vllm.Scheduler
    assert chosen(asynchronous=True) is kvframe_vllm.AsyncScheduler
    assert core.get_kv_cache_configs is planner


def test_both_and_calling_it_again_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFRAME_VLLM", "manager, planner")
    kvframe_vllm.register()
    planner, choose = core.get_kv_cache_configs, SchedulerConfig.get_scheduler_cls
    kvframe_vllm.register()
    assert core.get_kv_cache_configs is planner
    assert SchedulerConfig.get_scheduler_cls is choose
    activation.deactivate()
    assert chosen() is Scheduler
    assert core.get_kv_cache_configs.__module__.startswith("vllm.")


def test_schedulers_that_derive_from_vllms_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(AsyncScheduler):
        pass

    monkeypatch.setenv("KVFRAME_VLLM", "manager")
    kvframe_vllm.register()
    config = SchedulerConfig(max_model_len=64, is_encoder_decoder=False, scheduler_cls=Own)
    assert config.get_scheduler_cls() is Own


def test_by_name_as_vllm_resolves_it() -> None:
    config = SchedulerConfig(
        max_model_len=64, is_encoder_decoder=False, scheduler_cls="kvframe_vllm.Scheduler"
    )
    assert config.get_scheduler_cls() is kvframe_vllm.Scheduler


def test_another_version_is_refused_before_anything_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.version.__version__", "0.33.0")
    monkeypatch.setenv("KVFRAME_VLLM", "manager,planner")
    with pytest.raises(VersionError, match=r"0\.33\.0.*KVFRAME_VLLM_ANY_VERSION=1"):
        kvframe_vllm.register()
    assert chosen() is Scheduler
    assert core.get_kv_cache_configs.__module__.startswith("vllm.")
    monkeypatch.setenv("KVFRAME_VLLM_ANY_VERSION", "1")
    kvframe_vllm.register()
    assert chosen() is kvframe_vllm.Scheduler


def test_a_wrong_strategy_is_refused_before_anything_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFRAME_VLLM", "manager,planner")
    monkeypatch.setenv("KVFRAME_VLLM_STRATEGY", "best")
    with pytest.raises(SettingError, match="KVFRAME_VLLM_STRATEGY='best'"):
        kvframe_vllm.register()
    assert chosen() is Scheduler
