"""Planning cases with results worked out by hand, through the real command line.

`KVFRAME_CASES` names another folder of such files. A case of the form "plan" has every key of its `expected` checked;
a case of another form is named as not run here, with the file that has it as a test.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvframe import load_plugins
from kvframe.models import read_config, read_layers
from tests.command_line import Answer, kvframe

FOLDER = Path(os.environ.get("KVFRAME_CASES") or Path(__file__).parent / "data" / "cases")
CASES = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}
PLANS = {name: case for name, case in CASES.items() if case["form"] == "plan"}
OTHERS = {name: case for name, case in CASES.items() if case["form"] != "plan"}

# Which file has a worked problem as its test, by a field that only such problems have.
ELSEWHERE = {
    "entry_points": "tests/test_plugin_filters.py",
    "groups": "tests/blocks",
    "steps": "tests/blocks",
}


def test_there_are_cases():
    assert PLANS, f"no case of the form 'plan' in {FOLDER}"


@pytest.fixture
def run(tmp_path, capsys):
    def call(case, *more, command="plan", **changed) -> Answer:
        config = tmp_path / "config.json"
        config.write_text(json.dumps({**case["config"], **changed}), encoding="utf-8")
        return kvframe(capsys, command, config, *more)

    return call


def planned(answer):
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


def differences(wanted, got, where=""):
    """Every path at which `got` lacks or contradicts `wanted`; floats to a relative 1e-9, more keys are welcome."""
    if isinstance(wanted, Mapping):
        if not isinstance(got, Mapping):
            return [f"{where}: {got!r} is no object"]
        return [line for key in wanted for line in differences(wanted[key], got.get(key), f"{where}.{key}")]
    if isinstance(wanted, float) and isinstance(got, (int, float)):
        same = math.isclose(wanted, got, rel_tol=1e-9)
    else:
        same = wanted == got and isinstance(wanted, bool) == isinstance(got, bool)
    return [] if same else [f"{where}: {got!r}, must be {wanted!r}"]


@pytest.mark.parametrize("name", PLANS)
def test_plan(name, run):
    case = PLANS[name]
    answer = run(case, *case["args"], "--json")
    if "error" in case:
        check_error(answer, case["error"])
    else:
        assert differences(case["expected"], planned(answer)) == []


def check_error(answer, wanted):
    assert answer.code == 1, answer.out
    printed = json.loads(answer.out)
    error = printed["error"]
    assert printed.keys() == {"error"}
    assert error.keys() == {"kind", "type", "message", "fields"}
    assert error["kind"] == wanted["kind"]
    said = error["message"] + json.dumps(error["fields"], ensure_ascii=False)
    assert [words for words in wanted.get("must_mention", ()) if words not in said] == []
    assert differences(wanted.get("fields", {}), error["fields"]) == []
    assert error["message"] in answer.err


@pytest.mark.parametrize("name", PLANS)
def test_the_table_says_what_the_json_says(name, run):
    case = PLANS[name]
    answer = run(case, *case["args"])
    if "error" in case:
        assert (answer.code, answer.out) == (1, "")
        assert answer.err
        return
    result = planned(run(case, *case["args"], "--json"))
    assert answer.code == 0
    for key in ("num_blocks", "tokens", "blocks_per_request_total"):
        assert f"{result[key]:,}" in answer.out
    assert f"{result['max_concurrency']:,.2f}" in answer.out


@pytest.mark.parametrize("name", PLANS)
def test_numbers_agree_with_each_other(name, run):
    case = PLANS[name]
    if "error" in case:
        return
    result = planned(run(case, *case["args"], "--json"))
    length = int(case["args"][case["args"].index("--max-model-len") + 1])
    assert result["usable_blocks"] == result["num_blocks"] - 1
    assert result["max_concurrency"] == result["num_blocks"] / result["blocks_per_request_total"]
    assert result["tokens"] == result["num_blocks"] * length // result["blocks_per_request_total"]
    assert result["num_blocks"] * result["pool_block_bytes"] <= int(case["args"][1])


@pytest.mark.parametrize("name", OTHERS)
def test_other_forms_have_their_tests_elsewhere(name):
    case = OTHERS[name]
    places = sorted({place for field, place in ELSEWHERE.items() if field in case.get("input", {})})
    if not places:
        pytest.fail(f"{case['form']} {name} ({case['title']}) has no test: its input is {[*case['input']]}")
    missing = [place for place in places if not (Path(__file__).parent.parent / place).exists()]
    if missing:
        pytest.skip(f"not run: worked problem {name} ({case['title']}) belongs to {', '.join(missing)}")


# --- what else is true of the cases, for those that say it -----------------------------------------------------------


def facts(name):
    """Cases with an `also_true` fact of that name."""
    return [pytest.param(case, id=stem) for stem, case in PLANS.items() if name in case.get("also_true", {})]


def with_option(case, option, value):
    args = list(case["args"])
    args[args.index(option) + 1] = str(value)
    return args


def kinds(case):
    layers = read_layers(read_config(case["config"]), load_plugins())
    return [layer.kinds for layer in layers]


@pytest.mark.parametrize("case", facts("head_dim"))
def test_the_head_size_is_derived(case, run):
    result = planned(run(case, *case["args"], "--json"))
    heads = sum(result["kv_heads_per_rank"].values())
    # K and V of 2 bytes an element
    per_layer = sum(result["bytes_per_token_per_layer"].values())
    assert per_layer == 2 * heads * case["also_true"]["head_dim"] * 2


@pytest.mark.parametrize("case", facts("same_for_tensor_parallel"))
def test_ranks_do_not_share_a_latent_cache(case, run):
    for ranks in case["also_true"]["same_for_tensor_parallel"]:
        result = planned(run(case, *with_option(case, "--tensor-parallel-size", ranks), "--json"))
        assert differences(case["expected"], result) == []


@pytest.mark.parametrize("case", facts("other_tensor_parallel"))
def test_other_numbers_of_ranks(case, run):
    for ranks, wanted in case["also_true"]["other_tensor_parallel"].items():
        result = planned(run(case, *with_option(case, "--tensor-parallel-size", ranks), "--json"))
        assert [*result["kv_heads_per_rank"].values()] == [wanted["kv_heads_per_rank"]]
        assert differences({**wanted, "kv_heads_per_rank": {}}, result) == []
        assert result["kv_heads_total"] == case["expected"]["kv_heads_total"]


@pytest.mark.parametrize("case", facts("replication"))
def test_more_ranks_than_heads_hold_copies(case, run):
    result = planned(run(case, *case["args"], "--json"))
    ranks = int(case["args"][case["args"].index("--tensor-parallel-size") + 1])
    for kind, heads in result["kv_heads_total"].items():
        assert result["kv_heads_per_rank"][kind] * ranks == case["also_true"]["replication"] * heads


@pytest.mark.parametrize("case", facts("sliding_layer_indices"))
def test_which_layers_slide(case):
    sliding = [index for index, owned in enumerate(kinds(case)) if "sliding_attention" in owned]
    assert sliding == case["also_true"]["sliding_layer_indices"]


@pytest.mark.parametrize("case", facts("full_layer_indices"))
def test_which_layers_keep_every_token(case):
    full = [index for index, owned in enumerate(kinds(case)) if "full_attention" in owned]
    assert full == case["also_true"]["full_layer_indices"]


@pytest.mark.parametrize("case", facts("groups"))
def test_groups(case, run):
    result = planned(run(case, *case["args"], "--json"))
    wanted = [{group["kind"]: group["layers"]} for group in case["also_true"]["groups"]]
    got = [group["kinds"] for group in result["groups"]]
    assert sorted(got, key=json.dumps) == sorted(wanted, key=json.dumps)


@pytest.mark.parametrize("case", facts("state_bytes_per_layer"))
def test_a_states_page_is_padded(case, run):
    result = planned(run(case, *case["args"], "--json"))
    states = [group for group in result["groups"] if "full_attention" not in group["kinds"]]
    assert states
    for group in states:
        layers = sum(group["kinds"].values())
        assert group["natural_page_bytes"] == layers * case["also_true"]["state_bytes_per_layer"]
        padding = group["page_bytes"] - group["natural_page_bytes"]
        assert padding == layers * case["also_true"]["padding_bytes_per_state_page"]


@pytest.mark.parametrize("case", facts("with_scale_policy_unit"))
def test_scales_of_one_are_a_choice_with_a_warning(case, run):
    wanted = dict(case["also_true"]["with_scale_policy_unit"])
    warned = wanted.pop("warning")
    answer = run(case, *case["args"], "--scale-policy", "unit", "--json")
    result = planned(answer)
    assert differences(wanted, result) == []
    assert bool(result["warnings"]) is warned
    assert ("warning: " in answer.err) is warned


@pytest.mark.parametrize("case", facts("with_head_dim_128"))
def test_with_the_missing_field_it_is_planned(case, run):
    answer = run(case, "--json", "--cache-dtype", "bfloat16", command="inspect", head_dim=128)
    sizes = planned(answer)["bytes"]
    wanted = case["also_true"]["with_head_dim_128"]["bytes_per_token_tp1"]
    assert sizes["bytes_per_token_before_any_window_is_full"] == wanted


@pytest.mark.parametrize("case", facts("num_blocks_by_stage"))
def test_the_stage_with_the_fewest_blocks_decides(case, run):
    stages = planned(run(case, *case["args"], "--json"))["stages"]
    assert [stage["num_blocks"] for stage in stages] == case["also_true"]["num_blocks_by_stage"]
    layers = case["also_true"]["layers_per_group_by_stage"]
    assert [max(stage["layers_per_group"]) for stage in stages] == layers


CHECKED = {
    "head_dim",
    "same_for_tensor_parallel",
    "other_tensor_parallel",
    "replication",
    "sliding_layer_indices",
    "full_layer_indices",
    "groups",
    "state_bytes_per_layer",
    "padding_bytes_per_state_page",
    "with_scale_policy_unit",
    "with_head_dim_128",
    "num_blocks_by_stage",
    "layers_per_group_by_stage",
}


@pytest.mark.parametrize("name", PLANS)
def test_every_further_fact_is_checked(name):
    assert PLANS[name].get("also_true", {}).keys() - CHECKED == set()
