"""The Prometheus exporter, read as Prometheus reads it."""

import subprocess
import sys

import pytest

pytest.importorskip("prometheus_client", reason="the extra kvframe[metrics] is not installed")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvframe.blocks import Admission, BlockConfig, GroupBlocks, KVCacheManager
from kvframe.lifetime import Lifetime
from kvframe.metrics import StatisticsCollector


def scraped(registry):
    """(name, labels) to value, from the text that a server would send."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def manager():
    groups = [GroupBlocks(name="full", lifetime=Lifetime(block=4))]
    return KVCacheManager(BlockConfig(groups=groups, num_blocks=11, max_model_len=64, max_requests=2))


def test_a_scrape_shows_the_statistics_of_its_moment():
    registry, made = CollectorRegistry(), manager()
    registry.register(StatisticsCollector(made))
    assert scraped(registry)["kvframe_requests_running", ()] == 0
    (answer,) = made.admit([Admission(request=made.request([1] * 10), num_new_tokens=10)])
    now = scraped(registry)
    # 10 tokens in blocks of 4: 3 of 11 blocks and 2 places empty; the null block is not free either.
    assert now["kvframe_requests_running", ()] == 1
    assert now["kvframe_pool_usage_ratio", ()] == pytest.approx(4 / 11)
    assert now["kvframe_group_held_blocks", (("group", "full"),)] == 3
    assert now["kvframe_group_empty_tokens", (("group", "full"),)] == 2
    assert now["kvframe_pool_share", (("cause", "null_block"),)] == pytest.approx(1 / 11)
    made.release([answer.slot])
    made.admit([Admission(request=made.request([1] * 9), num_new_tokens=1)])
    then = scraped(registry)
    assert then["kvframe_requests_finished_total", ()] == 1
    assert then["kvframe_hit_tokens_total", ()] == 8
    assert then["kvframe_group_hit_tokens_total", (("group", "full"),)] == 8


def test_deferred_admissions_by_reason_and_labels_of_ones_own():
    registry, made = CollectorRegistry(), manager()
    registry.register(StatisticsCollector(made, labels={"rank": "3"}, prefix="engine_kv"))
    made.admit([Admission(request=made.request([number] * 4), num_new_tokens=4) for number in range(3)])
    labels = (("rank", "3"), ("reason", "no_slot"))
    assert scraped(registry)["engine_kv_admissions_deferred_total", labels] == 1


def test_without_the_library_the_error_names_the_extra():
    code = "import sys; sys.modules['prometheus_client'] = None; import kvframe.metrics"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingDependencyError" in run.stderr
    assert "pip install 'kvframe[metrics]'" in run.stderr
