"""config.json to layers to specs: finding fields, the common spellings, and errors of files that cannot be right."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe import FullAttentionSpec, Layer, LayerReader, ModelReader, PluginHost, hookimpl, load_plugins
from kvframe import plugins as plugins_module
from kvframe.discovery import Filters, entry_points_by_name
from kvframe.errors import (
    HookError,
    MissingFieldError,
    MissingPluginError,
    ModelConfigError,
    NotDivisibleError,
    PlanError,
    UnknownLayerKindError,
    UsageError,
)
from kvframe.models import (
    encoder_positions,
    inspect_model,
    max_model_len,
    model_dtype,
    model_specs,
    read_config,
    read_layers,
)
from kvframe.models.providers import DISTRIBUTIONS, NEEDED_KINDS
from kvframe.readers import ModelConfig
from kvframe.spelling import common_layers
from tests.model_configs import (
    BAMBA,
    KIMI,
    LATENT,
    LLAMA,
    SLIDING,
    WHISPER,
    at,
    kinds,
    options,
    specs,
)


@pytest.fixture(scope="module")
def host():
    return load_plugins()


# --- finding the decoder's fields ------------------------------------------------------------------------------------


def test_a_file_a_folder_and_a_dict_read_alike(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA), encoding="utf-8")
    assert read_config(file).values == read_config(tmp_path).values == read_config(LLAMA).values == LLAMA
    assert read_config(str(tmp_path)).file == str(file)
    assert read_config(LLAMA).file == "config.json"


def test_the_decoder_of_a_nested_config_is_its_text_config():
    nested = {**LLAMA, "model_type": "qwen2", "num_hidden_layers": 48}
    config = read_config(
        {"model_type": "outer", "num_hidden_layers": 34, "torch_dtype": "float16", "text_config": nested}
    )
    assert (config.model_type, config.num_layers, model_dtype(config)) == ("qwen2", 48, "float16")
    inner = read_config({"text_config": nested, "vision_config": {"num_hidden_layers": 34}})
    assert (inner.model_type, inner.num_layers) == ("qwen2", 48)
    outer = read_config({"model_type": "llama", "text_config": {**LLAMA, "model_type": None}})
    assert outer.model_type == "llama"
    assert read_config({**LLAMA, "text_config": None}).num_layers == 4


def test_a_nested_config_does_not_borrow_sizes_from_outside(tmp_path):
    file = tmp_path / "config.json"
    inner = {name: value for name, value in LLAMA.items() if name != "num_hidden_layers"}
    file.write_text(json.dumps({"num_hidden_layers": 34, "text_config": inner}), encoding="utf-8")
    with pytest.raises(MissingFieldError) as caught:
        specs(file)
    assert (caught.value.field, caught.value.file, caught.value.kind) == (
        "num_hidden_layers",
        str(file),
        "missing_field",
    )
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("content", ["{", "", "[1, 2]", '"llama"', b"\xff\xfe\x00"])
def test_a_file_that_holds_no_json_object_is_named(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelConfigError, match=r"JSON|object") as caught:
        read_config(file)
    assert (caught.value.file, caught.value.kind) == (str(file), "invalid_config")


def test_a_file_that_is_not_there_is_named(tmp_path):
    for source in (tmp_path / "nowhere.json", tmp_path):  # the folder is there and has no config.json
        with pytest.raises(ModelConfigError, match="No such file"):
            read_config(source)


def test_a_text_config_that_is_no_object_is_refused():
    with pytest.raises(ModelConfigError, match="text_config"):
        read_config({"text_config": "llama"})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": "float16", "torch_dtype": "float32"}, "float16"),
        ({}, "bfloat16"),
    ],
)
def test_the_models_dtype(fields, expected):
    assert model_dtype(read_config(fields)) == expected


def test_an_unknown_dtype_names_its_field():
    with pytest.raises(ModelConfigError) as caught:
        model_dtype(read_config({"torch_dtype": "float12"}))
    assert (caught.value.field, caught.value.value) == ("torch_dtype", "float12")


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"model_type": "step3_text", "max_position_embedding": 65536}, 65536),
        ({"model_type": "whisper", "max_target_positions": 448, "max_source_positions": 1500}, 448),
        ({}, None),
    ],
)
def test_the_longest_request(fields, length):
    assert max_model_len(read_config(fields)) == length


@pytest.mark.parametrize(("fields", "positions"), [({"max_source_positions": 1500}, 1500), ({}, None)])
def test_encoder_positions(fields, positions):
    assert encoder_positions(read_config(fields)) == positions


# --- values that cannot be right -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True, [4]])
def test_a_number_of_layers_that_is_no_positive_whole_number(value):
    with pytest.raises(ModelConfigError, match="num_hidden_layers") as caught:
        specs({**LLAMA, "num_hidden_layers": value})
    assert (caught.value.kind, caught.value.value) == ("invalid_config", value)


@pytest.mark.parametrize(
    ("missing", "field"),
    [
        ({"num_hidden_layers"}, "num_hidden_layers"),
        ({"hidden_size"}, "head_dim"),
        ({"num_attention_heads"}, "num_attention_heads"),
        ({"num_attention_heads", "num_key_value_heads"}, "num_key_value_heads"),
    ],
)
def test_a_field_that_cannot_be_derived_is_missing(missing, field):
    with pytest.raises(MissingFieldError) as caught:
        specs({name: value for name, value in LLAMA.items() if name not in missing})
    assert caught.value.field == field


def test_a_head_dim_is_never_rounded():
    # 5120 / 96 = 53.33…
    with pytest.raises(MissingFieldError, match=r"5120.*96") as caught:
        specs({**LLAMA, "hidden_size": 5120, "num_attention_heads": 96})
    assert caught.value.field == "head_dim"
    given = specs({**LLAMA, "hidden_size": 5120, "num_attention_heads": 96, "head_dim": 128})
    assert given.specs["layers.0.attn"].head_size == 128


@pytest.mark.parametrize("count", [3, 5])
def test_a_list_of_another_length_names_the_field_and_both_numbers(count):
    with pytest.raises(ModelConfigError) as caught:
        kinds({**LLAMA, "layer_types": ["full_attention"] * count})
    assert (caught.value.field, caught.value.value, caught.value.kind) == (
        "layer_types",
        count,
        "invalid_config",
    )
    assert str(count) in str(caught.value)
    assert "4" in str(caught.value)


@pytest.mark.parametrize("extra", [0, 3])
def test_draft_layers_at_the_end_of_a_list_are_left_out(extra):
    words = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = {**SLIDING, "num_nextn_predict_layers": 3, "layer_types": words + ["sliding_attention"] * extra}
    assert kinds(config) == words


@pytest.mark.parametrize("extra", [-1, 1, 2, 4])
def test_a_list_longer_by_another_number_than_the_draft_layers_is_wrong(extra):
    config = {**LLAMA, "num_nextn_predict_layers": 3, "layer_types": ["full_attention"] * (4 + extra)}
    with pytest.raises(ModelConfigError, match=r"4.*7"):
        kinds(config)


@pytest.mark.parametrize("words", ["full_attention", {"0": "full_attention"}, 4])
def test_layer_types_that_are_no_list_of_that_length(words):
    with pytest.raises(ModelConfigError, match="layer_types"):
        kinds({**LLAMA, "layer_types": words})


def test_a_word_that_is_no_word_is_named_by_its_place():
    with pytest.raises(ModelConfigError) as caught:
        kinds({**LLAMA, "layer_types": ["full_attention", 1, "full_attention", "full_attention"]})
    assert caught.value.field == "layer_types[1]"


def test_an_unknown_word_is_refused_with_its_layer():
    words = ["full_attention", "full_attention", "full_attention", "holographic_attention"]
    with pytest.raises(UnknownLayerKindError) as caught:
        kinds({**LLAMA, "model_type": "newthing", "layer_types": words})
    error = caught.value
    assert (error.kind, error.layer, error.value, error.field) == (
        "unknown_layer_type",
        3,
        "holographic_attention",
        "layer_types",
    )
    assert {"full_attention", "mla", "mamba2"} <= set(error.known)
    assert "kvframe plugins" in str(error)


def test_the_word_mamba_is_unknown_where_nothing_says_which_mamba():
    with pytest.raises(UnknownLayerKindError, match="mamba"):
        kinds({**LLAMA, "model_type": "newthing", "layer_types": ["mamba"] * 4})


@pytest.mark.parametrize(
    ("tp", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (64, 1)]
)  # max(1, 8 / tp)
def test_kv_heads_are_divided_or_copied(tp, heads):
    model = specs(LLAMA, tp=tp)
    assert model.kv_heads_total == {"full_attention": 8}
    assert model.kv_heads_per_rank == {"full_attention": heads}
    assert model.specs["layers.0.attn"].num_kv_heads == heads


@pytest.mark.parametrize("tp", [3, 6, 12])
def test_heads_that_do_not_divide_are_refused_with_both_numbers(tp):
    with pytest.raises(NotDivisibleError) as caught:
        specs(LLAMA, tp=tp)
    assert (caught.value.value, caught.value.divisor, caught.value.kind) == (8, tp, "not_divisible")


def test_heads_without_a_number_of_their_own_are_as_many_as_query_heads():
    model = specs({**LLAMA, "num_key_value_heads": None})
    assert model.kv_heads_total == {"full_attention": 32}


def test_k_and_v_may_differ_in_width():
    model = specs({**LLAMA, "head_dim": 192, "v_head_dim": 128})
    facts = inspect_model(model, load_plugins())["bytes"]
    assert facts["bytes_per_token_per_layer"] == {"full_attention": 8 * (192 + 128) * 2}


# --- the common spellings --------------------------------------------------------------------------------------------


def test_a_pattern_makes_every_pth_layer_full():
    assert at(kinds({**SLIDING, "num_hidden_layers": 26, "sliding_window_pattern": 6}), "full_attention") == [
        5,
        11,
        17,
        23,
    ]


def test_a_list_wins_over_a_pattern():
    words = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert kinds({**SLIDING, "sliding_window_pattern": 2, "layer_types": words}) == words


def test_a_pattern_without_a_window_is_refused():
    with pytest.raises(MissingFieldError, match="sliding_window"):
        specs({**LLAMA, "sliding_window_pattern": 2})


@pytest.mark.parametrize("model_type", ["mistral", "ministral3", "phi3", "mixtral", "newthing"])
@pytest.mark.parametrize(
    ("window", "kind"), [(128, "sliding_attention"), (None, "full_attention"), ("absent", "full_attention")]
)
def test_a_window_without_a_rule_is_every_layers(model_type, window, kind):
    config = {**LLAMA, "model_type": model_type, "sliding_window": window}
    if window == "absent":
        del config["sliding_window"]
    assert kinds(config) == [kind] * 4


@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl"])
@pytest.mark.parametrize(
    ("flag", "kind"), [(True, "sliding_attention"), (False, "full_attention"), (None, "full_attention")]
)
def test_the_qwen_types_need_the_flag_for_a_window(model_type, flag, kind):
    assert kinds({**SLIDING, "model_type": model_type, "use_sliding_window": flag}) == [kind] * 4


def test_a_flag_that_is_no_flag_is_refused():
    with pytest.raises(ModelConfigError, match=r"use_sliding_window.*true or false"):
        kinds({**SLIDING, "use_sliding_window": "false"})


def test_the_window_number_must_be_one():
    with pytest.raises(ModelConfigError, match="sliding_window"):
        specs({**SLIDING, "sliding_window": 0})


def test_chunks_without_a_rule_are_every_layers():
    model = specs({**LLAMA, "model_type": "newthing", "attention_chunk_size": 64})
    assert model.layers == {"chunked_attention": 4}
    assert model.specs["layers.3.attn"].attention_chunk_size == 64


def test_a_window_and_chunks_need_a_rule():
    with pytest.raises(ModelConfigError, match=r"attention_chunk_size.*sliding_window"):
        kinds({**SLIDING, "model_type": "newthing", "attention_chunk_size": 64})


def test_latent_attention_ignores_the_heads_and_is_not_divided():
    for tp in (1, 2, 3, 8):
        model = specs(LATENT, tp=tp)
        spec = model.specs["layers.0.attn"]
        assert model.layers == {"mla": 4}
        assert (spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.max_tp_shards) == (1, 576, 0, 1)
        assert model.kv_heads_total == model.kv_heads_per_rank == {"mla": 1}
        # (512 + 64) * 2
        assert inspect_model(model, load_plugins())["bytes"]["bytes_per_token_per_layer"] == {"mla": 1152}


def test_latent_attention_needs_both_of_its_widths():
    with pytest.raises(MissingFieldError, match="qk_rope_head_dim"):
        specs({**LATENT, "qk_rope_head_dim": None})


def test_listed_full_layers_are_latent_where_the_file_has_a_latent_rank():
    assert kinds({**LATENT, "layer_types": ["full_attention", "attention"] * 2}) == ["mla"] * 4


@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "fp8_e4m3", "fp8_ds_mla"])
@pytest.mark.parametrize("tp", [1, 8])
def test_an_indexer_keeps_the_same_bytes_whatever_the_cache_dtype(cache_dtype, tp):
    model = specs(
        {**LATENT, "model_type": "deepseek_v32", "index_head_dim": 128}, cache_dtype=cache_dtype, tp=tp
    )
    assert model.layers == {"mla": 4, "indexer": 4}
    assert [*model.specs][:2] == ["layers.0.attn", "layers.0.indexer"]
    assert [*model.kinds.values()][:2] == ["mla", "indexer"]
    sizes = inspect_model(model, load_plugins())["bytes"]["bytes_per_token_per_layer"]
    assert sizes["indexer"] == 128 + 4
    # bf16, one byte each, or the opaque row 512 + 16 + 128
    assert sizes["mla"] == {"auto": 1152, "bfloat16": 1152, "fp8_e4m3": 576, "fp8_ds_mla": 656}[cache_dtype]


@given(layers=st.integers(1, 40), period=st.integers(1, 8), share=st.floats(0, 1))
def test_every_layer_is_read_once_and_in_order(layers, period, share):
    # at least a period of layers own a cache, so that every kind has an owner
    owners = max(min(period, layers), layers - int(share * layers))
    config = {
        **SLIDING,
        "num_hidden_layers": layers,
        "sliding_window_pattern": period,
        "num_kv_shared_layers": layers - owners,
    }
    read = common_layers(ModelConfig(values=config))
    assert [layer.index for layer in read] == [*range(layers)]
    for layer in read:
        full = (layer.index + 1) % period == 0
        if layer.index < owners:
            assert layer.kinds == ("full_attention" if full else "sliding_attention",)
        else:
            assert layer.kinds == ("shared_no_cache",)
            assert layer.shares_with in range(owners)
            assert ((layer.shares_with + 1) % period == 0) == full


# --- cache dtypes and warnings ---------------------------------------------------------------------------------------


def test_a_quantised_cache_halves_tokens_and_leaves_states():
    whole, half = (
        inspect_model(specs(BAMBA, cache_dtype=name), load_plugins())["bytes"]
        for name in ("bfloat16", "fp8_e4m3")
    )
    key = "bytes_per_token_before_any_window_is_full"
    assert (whole[key], half[key]) == (2 * 2 * 8 * 128 * 2, 2 * 2 * 8 * 128)
    assert whole["constant_bytes_per_sequence"] == half["constant_bytes_per_sequence"]


def test_a_cache_dtype_that_does_not_serve_a_family_is_refused_with_both():
    with pytest.raises(UsageError) as caught:
        specs(LLAMA, cache_dtype="fp8_ds_mla")
    assert "fp8_ds_mla" in str(caught.value)
    assert "full_attention" in str(caught.value)
    assert specs(KIMI, cache_dtype="fp8_ds_mla").specs["layers.3.attn"].state_content_bytes == 656


def test_only_unknown_model_types_give_a_warning():
    assert specs(LLAMA).warnings == ()
    assert specs(BAMBA).warnings == ()
    for model_type in ("newthing", None):
        model = specs({**LLAMA, "model_type": model_type})
        assert model.layers == {"full_attention": 4}
        (warning,) = model.warnings
        assert (model_type or "model_type") in warning


# --- plugins ---------------------------------------------------------------------------------------------------------


def uninstalled(monkeypatch, *names):
    """A host of a machine on which these plugins are not installed."""
    found = {name: points for name, points in entry_points_by_name().items() if name not in names}
    monkeypatch.setattr(plugins_module, "entry_points_by_name", lambda: found)
    return PluginHost(filters=Filters())


@pytest.mark.parametrize(
    ("config", "kind", "plugin"),
    [
        (LATENT, "mla", "mla"),
        (SLIDING, "sliding_attention", "sliding_window"),
        ({**LLAMA, "model_type": "gemma2"}, "sliding_attention", "sliding_window"),
        ({**LLAMA, "model_type": "llama4_text"}, "chunked_attention", "chunked_local"),
        ({**LLAMA, "model_type": "jamba"}, "mamba1", "mamba"),
        ({**LLAMA, "layer_types": ["full_attention"] * 3 + ["short_conv"]}, "short_conv", "mamba"),
        ({**LLAMA, "text_config": {**LLAMA, "model_type": "qwen3_next"}}, "linear_attention", "mamba"),
        (WHISPER, "cross_attention", "cross_attention"),
    ],
)
def test_a_kind_without_its_plugin_is_an_error_that_says_what_to_install(monkeypatch, config, kind, plugin):
    host = uninstalled(monkeypatch, plugin)
    distribution = f"kvframe-{plugin.replace('_', '-')}"
    with pytest.raises(MissingPluginError) as caught:
        model_specs(read_config(config), host, options(host))
    assert (
        str(caught.value)
        == f"model needs layer kind {kind!r}, provided by {distribution}: pip install {distribution}"
    )
    assert model_specs(read_config(LLAMA), host, options(host)).layers == {"full_attention": 4}


def test_a_plugin_that_was_set_aside_says_why():
    host = PluginHost(filters=Filters(without=("kvframe-mamba",)))
    with pytest.raises(MissingPluginError) as caught:
        read_layers(read_config({**LLAMA, "model_type": "jamba"}), host)
    assert caught.value.distribution == "kvframe-mamba"
    assert caught.value.reason == "left out by KVFRAME_DISABLE_PLUGINS"


def test_the_table_of_providers_says_what_the_plugins_bring(host):
    brought = {kind: record.distribution for record in host.records for kind in record.layer_kinds}
    assert brought == DISTRIBUTIONS
    types = {name: record.distribution for record in host.records for name in record.model_types}
    assert types == {name: DISTRIBUTIONS[kind] for name, kind in NEEDED_KINDS.items()}


class Brings:
    """A plugin in code."""

    def __init__(self, layer_readers=(), model_readers=()):
        self.readers, self.types = list(layer_readers), list(model_readers)

    @hookimpl
    def kvframe_layer_readers(self):
        return self.readers

    @hookimpl
    def kvframe_model_readers(self):
        return self.types


def full(layer):
    return {"attn": layer.attention(FullAttentionSpec)}


def test_a_plugin_adds_a_layer_kind_by_its_word():
    host = load_plugins(extra=[Brings([LayerReader(kind="holographic_attention", read=full)])])
    words = ["holographic_attention", "full_attention"] * 2
    model = model_specs(read_config({**LLAMA, "layer_types": words}), host, options(host))
    assert model.layers == {"holographic_attention": 2, "full_attention": 2}
    assert model.kv_heads_total == {"holographic_attention": 8, "full_attention": 8}


def test_a_plugin_reads_a_model_type_of_its_own():
    facts = {"num_key_value_heads": 2}
    read = lambda config: [Layer(index=0, kinds=("full_attention",), facts=facts)]  # noqa: E731
    host = load_plugins(extra=[Brings(model_readers=[ModelReader(model_types=("newthing",), read=read)])])
    model = model_specs(read_config({**LLAMA, "model_type": "newthing"}), host, options(host))
    assert (model.kv_heads_total, model.warnings) == ({"full_attention": 2}, ())


def test_a_reader_that_fails_is_named():
    def fails(_):
        raise KeyError("window")

    layers = load_plugins(extra=[Brings([LayerReader(kind="strange", read=fails)])])
    with pytest.raises(HookError, match=r"extra-0.*'strange' raised KeyError"):
        model_specs(read_config({**LLAMA, "layer_types": ["strange"] * 4}), layers, options(layers))
    models = load_plugins(extra=[Brings(model_readers=[ModelReader(model_types=("odd",), read=fails)])])
    with pytest.raises(HookError, match=r"extra-0.*'odd' raised KeyError"):
        read_layers(read_config({"model_type": "odd"}), models)


def test_two_kinds_of_a_layer_cannot_name_one_cache():
    both = lambda config: [Layer(index=0, kinds=("full_attention", "second"))]  # noqa: E731
    plugin = Brings([LayerReader(kind="second", read=full)], [ModelReader(model_types=("both",), read=both)])
    host = load_plugins(extra=[plugin])
    with pytest.raises(PlanError, match=r"'full_attention' and 'second'.*layers\.0\.attn"):
        model_specs(read_config({**LLAMA, "model_type": "both"}), host, options(host))
