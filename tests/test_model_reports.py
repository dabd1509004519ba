"""Public reports about reading configs, each as a test of the right result (report numbers: the log, section D)."""

import pytest

from kvframe import load_plugins
from kvframe.errors import ModelConfigError
from kvframe.models import encoder_positions, max_model_len, read_config
from tests.model_configs import LATENT, LLAMA, SLIDING, WHISPER, kinds, specs


@pytest.fixture(scope="module")
def host():
    return load_plugins()


QWEN = {**SLIDING, "model_type": "qwen2", "num_hidden_layers": 28, "use_sliding_window": True}


def test_report_69_max_window_layers_equal_to_the_number_of_layers_is_no_window():
    assert kinds({**QWEN, "max_window_layers": 28}) == ["full_attention"] * 28


@pytest.mark.parametrize("first", [0, 1, 21, 27, 28, 40])
def test_report_70_layers_from_max_window_layers_on_slide(first):
    expected = ["sliding_attention" if index >= first else "full_attention" for index in range(28)]
    assert kinds({**QWEN, "max_window_layers": first}) == expected


def test_report_71_a_window_belongs_to_a_layer():
    model = specs({**QWEN, "max_window_layers": 21})
    assert model.layers == {"full_attention": 21, "sliding_attention": 7}
    windows = [getattr(model.specs[f"layers.{index}.attn"], "sliding_window", None) for index in range(28)]
    assert windows == [None] * 21 + [128] * 7


def test_report_72_a_window_that_is_switched_off_has_no_effect():
    off = {**QWEN, "use_sliding_window": False, "max_window_layers": 21}
    assert kinds(off) == ["full_attention"] * 28
    words = ["full_attention", "sliding_attention"] * 14
    assert kinds({**off, "layer_types": words}) == ["full_attention"] * 28


def test_report_73_gemma2_alternates():
    read = kinds({**SLIDING, "model_type": "gemma2"})
    assert read == ["sliding_attention", "full_attention"] * 2


def test_report_74_layers_that_use_another_layers_cache_own_none():
    words = [*["sliding_attention"] * 4, "full_attention"] * 7
    model = specs(
        {
            **SLIDING,
            "model_type": "gemma4_text",
            "num_hidden_layers": 35,
            "layer_types": words,
            "num_kv_shared_layers": 20,
        }
    )
    assert model.layers == {"sliding_attention": 12, "full_attention": 3, "shared_no_cache": 20}
    assert len(model.specs) == 15
    assert {model.shares_with[index] for index in range(19, 35, 5)} == {14}  # the full ones
    assert model.shares_with[15] == model.shares_with[33] == 13
    assert [*model.shares_with] == [*range(15, 35)]


def test_report_74_a_shared_layer_needs_an_earlier_one_of_its_kind():
    words = ["full_attention"] * 3 + ["sliding_attention"]
    for shared, listed in ((1, words), (4, ["full_attention"] * 4), (5, ["full_attention"] * 4)):
        with pytest.raises(ModelConfigError, match="num_kv_shared_layers"):
            kinds({**SLIDING, "layer_types": listed, "num_kv_shared_layers": shared})


def test_report_75_cross_attention_is_sized_by_the_encoder():
    config = read_config({**WHISPER, "max_source_positions": 1500, "max_target_positions": 448})
    assert (encoder_positions(config), max_model_len(config)) == (1500, 448)


def test_report_76_cross_attention_holds_the_encoders_blocks(host):
    spec = specs(WHISPER, max_model_len=8192).specs["layers.0.cross_attn"]
    lifetime = host.family(spec).lifetime(spec)
    assert lifetime.peak(1, 8192, max_encoder_tokens=1500) == 94  # ceil(1500 / 16)


def test_report_77_cross_attention_forbids_prefix_hits(host):
    spec = specs(WHISPER).specs["layers.0.cross_attn"]
    assert host.family(spec).lifetime(spec).hits == "never"


@pytest.mark.parametrize(("tp", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1), (16, 1)])
def test_report_78_more_ranks_than_heads_copy_heads(tp, heads):
    model = specs({**LLAMA, "num_key_value_heads": 4}, tp=tp)
    assert model.kv_heads_per_rank == {"full_attention": heads}


def test_report_79_the_total_is_not_computed_back_from_copies():
    model = specs({**LLAMA, "num_key_value_heads": 2}, tp=4)
    assert model.kv_heads_total == {"full_attention": 2}  # not 1 * 4
    assert model.specs["layers.0.attn"].max_tp_shards == 2


def test_report_80_a_latent_cache_is_not_checked_for_heads():
    assert specs({**LATENT, "num_key_value_heads": 10}, tp=4).kv_heads_per_rank == {"mla": 1}
