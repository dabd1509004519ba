"""`kvframe simulate` as people call it."""

import json

import pytest

from kvframe.simulate import Arrival, mooncake_lines
from tests.command_line import kvframe

MODEL = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 128,
    "sliding_window": 64,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}
SMALL = ("--memory", "1MiB", "--requests", "150", "--prompt", "8-64", "--output", "8-64")


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return path


def simulated(capsys, model, *arguments):
    answer = kvframe(capsys, "simulate", model, *SMALL, *arguments, "--json")
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


def test_one_case_as_json(capsys, model):
    values = simulated(capsys, model, "--seed", "5")
    (result,) = values["results"]
    assert values["seed"] == 5
    assert (result["requests"], result["finished"]) == (150, 150)
    assert result["name"] == {
        "memory": 1 << 20,
        "block_size": 16,
        "strategy": "optimal",
        "eviction": "lru",
    }
    assert result["alive_at_first_refusal"] > 0
    assert 0.5 < result["useful_at_first_refusal"] < 1
    assert {group["name"] for group in result["groups"]} == {"sliding_attention", "full_attention"}


def test_a_seed_makes_it_reproducible(capsys, model):
    assert simulated(capsys, model, "--seed", "5") == simulated(capsys, model, "--seed", "5")
    assert simulated(capsys, model, "--seed", "5") != simulated(capsys, model, "--seed", "6")


def test_every_combination_is_simulated(capsys, model):
    found = simulated(
        capsys, model, "--memory", "1MiB,2MiB", "--block-size", "8,16", "--eviction", "lru,frequency"
    )
    names = [tuple(result["name"].values()) for result in found["results"]]
    assert len(set(names)) == 8
    assert names[0] == (1 << 20, 8, "optimal", "lru")


def test_documents_are_found(capsys, model):
    (result,) = simulated(capsys, model, "--documents", "2", "--document", "128")["results"]
    assert result["hit_rate"] > 0.3
    assert result["caching"]


def test_people_get_tables(capsys, model):
    answer = kvframe(capsys, "simulate", model, *SMALL, "--strategy", "optimal,engine")
    assert answer.code == 0
    assert "alive at first refusal" in answer.out
    assert "1.00 MiB, blocks of 16, engine, lru:" in answer.out
    assert "No prefix could be found twice" in answer.out
    assert "\x1b" not in answer.out + answer.err  # neither colours nor a progress bar without a terminal


def test_a_recorded_stream(capsys, model, tmp_path):
    stream = tmp_path / "trace.jsonl"
    arrivals = [Arrival(arrival=i, prompt=600, output=8, prefix=(("manual", 512),)) for i in range(6)]
    stream.write_text("\n".join(mooncake_lines(arrivals)))
    answer = kvframe(capsys, "simulate", model, "--memory", "4MiB", "--stream", stream, "--json")
    (result,) = json.loads(answer.out)["results"]
    assert (result["requests"], result["prompt_tokens"]) == (6, 3600)
    assert result["hit_tokens"] == 5 * 512


def test_a_report_as_html(capsys, model, tmp_path):
    pytest.importorskip("jinja2", reason="the extra kvframe[report] is not installed")
    page = tmp_path / "report.html"
    answer = kvframe(capsys, "simulate", model, *SMALL, "--strategy", "optimal,engine", "--html", page)
    assert answer.code == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("<section") == 3  # all cases, and each
    assert "http" not in text.replace("http-equiv", "")


def test_wrong_usage_says_what_to_change(capsys, model, tmp_path):
    stream = tmp_path / "trace.jsonl"
    stream.write_text('{"prompt": 4, "output": 1}')
    both = kvframe(capsys, "simulate", model, "--memory", "1MiB", "--stream", stream, "--prompt", "8")
    assert (both.code, "leave --prompt out" in both.err) == (2, True)
    alone = kvframe(capsys, "simulate", model, "--memory", "1MiB", "--document", "8")
    assert (alone.code, "goes with --documents" in alone.err) == (2, True)


def test_refusals_are_typed(capsys, model, tmp_path):
    lengths = kvframe(capsys, "simulate", model, "--memory", "1MiB", "--prompt", "many", "--json")
    assert (lengths.code, json.loads(lengths.out)["error"]["kind"]) == (1, "stream")
    missing = kvframe(capsys, "simulate", model, "--memory", "1MiB", "--stream", tmp_path / "no", "--json")
    assert (missing.code, json.loads(missing.out)["error"]["kind"]) == (1, "stream")
    small = kvframe(capsys, "simulate", model, "--memory", "1KiB", "--json")
    assert (small.code, json.loads(small.out)["error"]["kind"]) == (1, "insufficient_memory")
    policy = kvframe(capsys, "simulate", model, *SMALL, "--eviction", "newest", "--json")
    assert (policy.code, json.loads(policy.out)["error"]["kind"]) == (1, "spec_invalid")
    strategy = kvframe(capsys, "simulate", model, *SMALL, "--strategy", "best", "--json")
    assert (strategy.code, json.loads(strategy.out)["error"]["kind"]) == (2, "usage")


def test_help_has_examples(capsys):
    answer = kvframe(capsys, "simulate", "--help")
    assert answer.code == 0
    assert answer.out.count("kvframe simulate config.json") >= 5
    assert '"hash_ids"' in answer.out
