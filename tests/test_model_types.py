"""Model types whose config spells layers in a way of its own, and the states of their layers."""

import pytest

from kvframe import load_plugins
from kvframe.errors import MissingFieldError, ModelConfigError
from kvframe.models import inspect_model
from tests.model_configs import BAMBA, KIMI, LATENT, LLAMA, MAMBA2, SLIDING, WHISPER, at, kinds, specs

# --- model types -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "period"),
    [
        ("gemma2", 2),
        ("gpt_oss", 2),
        ("gemma3_text", 6),
        ("cohere2", 4),
        ("olmo3", 4),
        ("gemma3n_text", 5),
    ],
)
def test_types_that_alternate_without_a_key(model_type, period):
    config = {**SLIDING, "model_type": model_type, "num_hidden_layers": 24}
    read = kinds(config)
    assert at(read, "full_attention") == [i for i in range(24) if (i + 1) % period == 0]
    assert set(read) == {"full_attention", "sliding_attention"}
    assert kinds({**config, "layer_types": ["full_attention"] * 24}) == ["full_attention"] * 24
    assert at(kinds({**config, "sliding_window_pattern": 3}), "full_attention") == [*range(2, 24, 3)]


def test_a_type_that_alternates_has_no_default_window():
    with pytest.raises(MissingFieldError, match="sliding_window"):
        specs({**LLAMA, "model_type": "gemma2"})


def test_gemma4_has_full_layers_of_their_own_size_and_a_full_last_layer():
    config = {**SLIDING, "model_type": "gemma4_text", "num_hidden_layers": 15, "head_dim": 256}
    assert at(kinds(config), "full_attention") == [5, 11, 14]
    sliding, full = (specs(config).specs[f"layers.{index}.attn"] for index in (0, 5))
    assert (sliding.num_kv_heads, sliding.head_size) == (8, 256)
    assert (full.num_kv_heads, full.head_size) == (8, 512)
    own = {"global_head_dim": 384, "num_global_key_value_heads": 2}
    for k_is_v, heads in ((True, 2), (False, 8)):
        full = specs({**config, **own, "attention_k_eq_v": k_is_v}).specs["layers.5.attn"]
        assert (full.num_kv_heads, full.head_size) == (heads, 384)


def test_mimo_has_sliding_layers_of_their_own_heads_and_no_chunks():
    config = {
        **SLIDING,
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": 13,
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 96,
        "swa_v_head_dim": 64,
        "attention_chunk_size": 128,
    }
    assert at(kinds(config), "full_attention") == [0, 5, 11]
    pattern = [0, 1] * 6 + [1]
    assert at(kinds({**config, "hybrid_layer_pattern": pattern}), "full_attention") == [*range(0, 12, 2)]
    full, sliding = (specs(config).specs[f"layers.{index}.attn"] for index in (0, 1))
    assert (full.num_kv_heads, full.head_size, full.head_size_v) == (8, 192, 128)
    assert (sliding.num_kv_heads, sliding.head_size, sliding.head_size_v) == (4, 96, 64)
    with pytest.raises(ModelConfigError) as caught:
        kinds({**config, "hybrid_layer_pattern": [0, 2] * 6 + [1]})
    assert (caught.value.field, caught.value.value) == ("hybrid_layer_pattern[1]", 2)


def test_llama4_reads_no_rope_layers_then_the_interval():
    config = {**LLAMA, "model_type": "llama4_text", "num_hidden_layers": 8, "attention_chunk_size": 8192}
    assert at(kinds(config), "full_attention") == [3, 7]
    assert at(kinds({**config, "no_rope_layers": []}), "full_attention") == [3, 7]
    assert at(kinds({**config, "no_rope_layer_interval": 2}), "full_attention") == [1, 3, 5, 7]
    assert at(kinds({**config, "no_rope_layers": [1, 0, 1, 1, 1, 1, 1, 1]}), "full_attention") == [1]
    assert set(kinds(config)) == {"full_attention", "chunked_attention"}


def test_glm_shares_indexers():
    config = {**LATENT, "model_type": "glm_moe_dsa", "num_hidden_layers": 9, "index_head_dim": 128}
    owners = lambda changed: at(kinds({**config, **changed}), "mla+indexer")  # noqa: E731
    assert owners({}) == [*range(9)]
    # max(i - 3 + 1, 0) % 4 == 0: 0, 1, 2, 6
    assert owners({"index_topk_freq": 4, "index_skip_topk_offset": 3}) == [0, 1, 2, 6]
    # the default offset 2: max(i - 1, 0) % 4 == 0
    assert owners({"index_topk_freq": 4}) == [0, 1, 5]
    assert owners({"index_topk_pattern": "FFSSSFSSS", "index_topk_freq": 4}) == [0, 1, 5]
    types = ["full"] * 2 + ["shared"] * 7
    assert owners({"indexer_types": types, "index_topk_pattern": "FFFFFFFFF"}) == [0, 1]
    assert specs({**config, "indexer_types": types}).layers == {"mla": 9, "indexer": 2}


def test_a_searched_model_has_layers_without_attention_and_heads_by_layer():
    blocks = [
        {"attention": {"n_heads_in_group": 8, "no_op": False}},
        {"attention": {"n_heads_in_group": None, "no_op": True}},
        {"attention": {"n_heads_in_group": 16}},
        {"attention": {"n_heads_in_group": 4, "no_op": False}},
    ]
    config = {**LLAMA, "model_type": "nemotron-nas", "num_key_value_heads": None, "block_configs": blocks}
    model = specs(config)
    assert model.layers == {"full_attention": 3, "no_cache": 1}
    assert [spec.num_kv_heads for spec in model.specs.values()] == [4, 2, 8]  # 32 / 8, 32 / 16, 32 / 4
    assert model.kv_heads_total == {"full_attention": 8}
    facts = inspect_model(model, load_plugins())["bytes"]
    assert facts["bytes_per_token_before_any_window_is_full"] == (4 + 2 + 8) * 2 * 128 * 2
    wrong = [*blocks[:3], {"attention": {"n_heads_in_group": 5, "no_op": False}}]
    with pytest.raises(ModelConfigError, match=r"block_configs\[3\].attention.n_heads_in_group = 5.*32"):
        specs({**config, "block_configs": wrong})
    with pytest.raises(ModelConfigError, match=r"block_configs\[0\].attention"):
        specs({**config, "block_configs": [{}, *blocks[1:]]})
    with pytest.raises(MissingFieldError, match="block_configs"):
        specs({**config, "block_configs": None})


def test_step3_calls_kv_heads_attention_groups():
    model = specs(
        {**LLAMA, "model_type": "step3_text", "num_key_value_heads": None, "num_attention_groups": 1}
    )
    assert model.kv_heads_total == {"full_attention": 1}
    with pytest.raises(MissingFieldError, match="num_attention_groups"):
        specs({**LLAMA, "model_type": "step3_text"})


def test_whisper_reads_the_decoders_fields():
    model = specs(WHISPER, tp=4)
    assert model.layers == {"full_attention": 3, "cross_attention": 3}
    assert model.kv_heads_total == {"full_attention": 20, "cross_attention": 20}
    assert model.kv_heads_per_rank == {"full_attention": 5, "cross_attention": 5}
    assert model.specs["layers.0.attn"].head_size == 64  # 1280 / 20
    facts = inspect_model(model, load_plugins())["bytes"]
    assert facts["cross_bytes_per_encoder_position"] == 3 * 2 * 5 * 64 * 2
    assert facts["bytes_per_token_before_any_window_is_full"] == 3 * 2 * 5 * 64 * 2
    with pytest.raises(MissingFieldError, match="decoder_layers"):
        specs({**WHISPER, "decoder_layers": None})


@pytest.mark.parametrize(("fields", "layers"), [({"num_decoder_layers": 3}, 3), ({}, 6)])
def test_t5_names_its_heads_and_layers_otherwise(fields, layers):
    model = specs(
        {"model_type": "t5", "num_heads": 8, "d_kv": 64, "d_model": 1024, "num_layers": 6, **fields}
    )
    assert model.layers == {"full_attention": layers, "cross_attention": layers}
    assert (model.specs["layers.0.cross_attn"].num_kv_heads, model.specs["layers.0.attn"].head_size) == (
        8,
        64,
    )


# --- states ----------------------------------------------------------------------------------------------------------


def test_layers_with_attention_by_their_numbers():
    assert kinds(BAMBA) == ["mamba2", "full_attention"] * 2
    lfm2 = {**LLAMA, "model_type": "lfm2", "conv_L_cache": 3}
    assert at(kinds({**lfm2, "full_attn_idxs": [2]}), "full_attention") == [2]
    assert (
        kinds({**lfm2, "layer_types": ["conv", "full_attention"] * 2}) == ["short_conv", "full_attention"] * 2
    )
    for wrong in ([1, 4], [-1], [1.0], "13", [True]):
        with pytest.raises(ModelConfigError, match="attn_layer_indices"):
            kinds({**BAMBA, "attn_layer_indices": wrong})
    with pytest.raises(MissingFieldError, match="attn_layer_indices"):
        kinds({**BAMBA, "attn_layer_indices": None})


def test_jamba_has_attention_at_an_offset_of_its_period():
    config = {**LLAMA, "model_type": "jamba", "num_hidden_layers": 16}
    assert at(kinds(config), "full_attention") == [4, 12]
    assert at(kinds({**config, "attn_layer_period": 5, "attn_layer_offset": 0}), "full_attention") == [
        0,
        5,
        10,
        15,
    ]
    assert set(kinds(config)) == {"full_attention", "mamba1"}


def test_granite_has_two_words_for_mamba2_and_no_pattern():
    config = {**LLAMA, **MAMBA2, "model_type": "granitemoehybrid"}
    for word in ("mamba", "linear_attention"):
        words = [word, "attention", word, "full_attention"]
        assert kinds({**config, "layer_types": words}) == ["mamba2", "full_attention"] * 2
    with pytest.raises(MissingFieldError, match="layer_types"):
        kinds(config)


def test_falcon_has_attention_and_a_state_in_every_layer():
    model = specs({**LLAMA, **MAMBA2, "model_type": "falcon_h1"})
    assert model.layers == {"full_attention": 4, "mamba2": 4}
    assert [*model.specs][:2] == ["layers.0.attn", "layers.0.state"]


def test_kimi_counts_layers_from_one_and_keeps_float32_states():
    assert kinds(KIMI) == ["linear_attention"] * 3 + ["mla"]
    state = specs(KIMI, state_dtype="bfloat16").specs["layers.0.state"]
    assert state.shapes == ((3, 3 * 32 * 128), (32, 128, 128))
    assert state.dtypes == ("bfloat16", "float32")
    assert specs(KIMI, tp=4).specs["layers.0.state"].shapes[1] == (8, 128, 128)


@pytest.mark.parametrize(
    ("full", "states"), [([4], [1, 2]), ([3, 4], [1, 2, 3]), ([5], [1, 2, 3]), ([0], [1, 2, 3])]
)
def test_kimis_lists_name_every_layer_once(full, states):
    section = {**KIMI["linear_attn_config"], "full_attn_layers": full, "kda_layers": states}
    with pytest.raises(ModelConfigError, match="linear_attn_config"):
        kinds({**KIMI, "linear_attn_config": section})


def test_minimax_reads_its_list_of_types():
    config = {**LLAMA, "model_type": "minimax_m1", "head_dim": 128, "attn_type_list": [0, 1, 0, 1]}
    assert kinds(config) == ["linear_attention", "full_attention"] * 2
    assert specs(config, tp=2).specs["layers.0.state"].shapes == ((16, 128, 128),)
    with pytest.raises(MissingFieldError, match="attn_type_list"):
        kinds({**config, "attn_type_list": None})


def test_nemotron_h_reads_letters_or_words():
    sizes = {
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "attention_head_dim": 96,
    }
    config = {**LLAMA, **sizes, "model_type": "nemotron_h", "hybrid_override_pattern": "M*-E"}
    expected = ["mamba2", "full_attention", "no_cache", "no_cache"]
    assert kinds(config) == expected
    words = {"hybrid_override_pattern": None, "layers_block_type": ["mamba", "attention", "mlp", "moe"]}
    assert kinds({**config, **words}) == expected
    assert specs(config).specs["layers.1.attn"].head_size == 96
    assert specs({**config, "head_dim": 64}).specs["layers.1.attn"].head_size == 64
    # [k - 1, 16 * 64 + 2 * 8 * 128], [16, 64, 128]
    assert specs(config).specs["layers.0.state"].shapes == ((3, 3072), (16, 64, 128))
    with pytest.raises(ModelConfigError) as caught:
        kinds({**config, "hybrid_override_pattern": "M*-E-"})
    assert (caught.value.field, caught.value.value) == ("hybrid_override_pattern", 5)
    with pytest.raises(ModelConfigError, match=r"hybrid_override_pattern\[3\]"):
        kinds({**config, "hybrid_override_pattern": "M*-X"})


DELTA_NET = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_qwen_has_full_attention_at_an_interval(model_type):
    config = {**LLAMA, **DELTA_NET, "model_type": model_type, "num_hidden_layers": 8}
    assert at(kinds(config), "full_attention") == [3, 7]
    assert at(kinds({**config, "full_attention_interval": 3}), "full_attention") == [2, 5]
    words = ["linear_attention", "full_attention"] * 4
    assert kinds({**config, "layer_types": words}) == words
    # [k - 1, 2 * 4 * 128 + 8 * 64], [8, 64, 128]
    assert specs(config).specs["layers.0.state"].shapes == ((3, 1536), (8, 64, 128))


def test_a_missing_size_of_a_state_names_its_own_field():
    for field in MAMBA2:
        with pytest.raises(MissingFieldError) as caught:
            specs({**BAMBA, field: None})
        assert caught.value.field == field
    section = {**KIMI["linear_attn_config"], "head_dim": None}
    with pytest.raises(MissingFieldError) as caught:
        specs({**KIMI, "linear_attn_config": section})
    assert caught.value.field == "linear_attn_config.head_dim"


def state(config=BAMBA, **changed):
    return specs(config, **changed).specs["layers.0.state"]


def test_cached_states_are_kept_at_every_block_others_once():
    cached, uncached = state(caching=True, block_size=32), state(caching=False, block_size=32)
    assert (cached.mamba_cache_mode, cached.block_size) == ("align", 32)
    assert (uncached.mamba_cache_mode, uncached.block_size) == ("none", 4096)


def test_draft_tokens_widen_the_convolution_state_and_need_states_of_their_own():
    plain, drafts = state(), state(speculative_tokens=2)
    assert plain.shapes == ((3, 48 * 64 + 2 * 128), (48, 64, 128))
    assert drafts.shapes == ((5, 48 * 64 + 2 * 128), (48, 64, 128))
    assert (plain.num_speculative_blocks, drafts.num_speculative_blocks) == (0, 2)


@pytest.mark.parametrize(
    ("fields", "changed", "dtypes"),
    [
        ({}, {}, ("bfloat16", "bfloat16")),
        ({}, {"cache_dtype": "float32"}, ("float32", "float32")),
        ({}, {"cache_dtype": "auto", "model_dtype": "float16"}, ("float16", "float16")),
        ({}, {"cache_dtype": "fp8_e4m3", "model_dtype": "float16"}, ("float16", "float16")),
        ({}, {"cache_dtype": "int8_per_token_head"}, ("bfloat16", "bfloat16")),
        ({"mamba_ssm_dtype": "float32"}, {}, ("bfloat16", "float32")),
        ({"mamba_ssm_cache_dtype": "float32"}, {}, ("bfloat16", "float32")),
        ({"mamba_ssm_dtype": "float32"}, {"state_dtype": "float16"}, ("bfloat16", "float16")),
    ],
)
def test_the_dtypes_of_states(fields, changed, dtypes):
    assert state({**BAMBA, **fields}, **changed).dtypes == dtypes


def test_an_unknown_state_dtype_names_its_field():
    with pytest.raises(ModelConfigError) as caught:
        state({**BAMBA, "mamba_ssm_dtype": "float12"})
    assert (caught.value.field, caught.value.value) == ("mamba_ssm_dtype", "float12")
