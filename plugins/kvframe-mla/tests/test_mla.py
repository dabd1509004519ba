import itertools
import math
import pickle

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvframe_mla
from kvframe import EngineConfig, FullAttentionSpec, KVQuantMode, Refusal, load_plugins
from kvframe.errors import SpecError
from kvframe.family import full_attention_family
from kvframe.packing import packed
from kvframe_mla import MLAAttentionSpec, SlidingWindowMLASpec, SparseCacheRole, row_bytes

MLA, WINDOW = kvframe_mla.kvframe_spec_families()


def latent(**changes):
    return MLAAttentionSpec(
        **{"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": "bfloat16", **changes}
    )


def window(**changes):
    fields = {
        "block_size": 64,
        "num_kv_heads": 1,
        "head_size": 576,
        "dtype": "bfloat16",
        "sliding_window": 128,
    }
    return SlidingWindowMLASpec(**{**fields, **changes})


V4 = {
    "block_size": 256,
    "head_size": 512,
    "dtype": "uint8",
    "state_content_bytes": 584,
    "alignment": 576,
    "model_version": "deepseek_v4",
}
shared = {
    "block_size": st.sampled_from([16, 64, 256]),
    "head_size": st.integers(1, 600),
    "dtype": st.sampled_from(["bfloat16", "uint8"]),
    "tokens_per_state": st.sampled_from([1, 4]),
    "alignment": st.one_of(st.none(), st.integers(1, 1024)),
    "kv_quant_mode": st.sampled_from([KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR]),
    "head_size_v": st.sampled_from([0, 64]),
}
latents = st.builds(
    latent,
    cache_role=st.sampled_from(SparseCacheRole),
    non_causal=st.booleans(),
    non_causal_multi_token_decode=st.booleans(),
    storage_block_size=st.sampled_from([None, 64]),
    **shared,
)
windows = st.builds(window, sliding_window=st.integers(1, 512), bounded_replay=st.booleans(), **shared)


def family(layer):
    return MLA if isinstance(layer, MLAAttentionSpec) else WINDOW


# --- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ({}, 73_728),  # 64 * 576 * 2
        ({"dtype": "uint8", "state_content_bytes": 656}, 41_984),  # 64 * 656
        ({"dtype": "uint8", "state_content_bytes": 352}, 22_528),  # 64 * 352
        ({"dtype": "uint8", "head_size": 132, "cache_role": SparseCacheRole.INDEXER}, 8_448),  # 64 * 132
        ({**V4, "tokens_per_state": 4}, 37_440),  # 64 * 584 = 37376 -> 65 * 576
        ({**V4, "tokens_per_state": 128}, 1_728),  # 2 * 584 = 1168 -> 3 * 576
        ({**V4, "tokens_per_state": 4, "state_content_bytes": 132}, 8_640),  # 64 * 132 = 8448 -> 15 * 576
    ],
)
def test_pages(words, page):
    assert latent(**words).page_size_bytes == page


def test_a_latent_row_has_no_values_and_whole_tokens_stay():
    engine = EngineConfig(max_model_len=4096)
    assert latent().head_size_v == 0
    assert latent().max_memory_usage_bytes(engine) == 64 * 73_728  # ceil(4096 / 64) pages
    assert MLA.lifetime(latent()).dead(4096, 1) == (0, 0)


def test_padding_follows_the_block_size():
    layer = latent(**V4, tokens_per_state=4)
    assert layer.copy_with_new_block_size(288).page_size_bytes == 42_048 == 73 * 576  # 72 * 584, rounded up
    assert layer.copy_with_new_block_size(288).copy_with_new_block_size(256) == layer


@given(
    st.one_of(latents, windows), st.sampled_from([16, 32, 64, 288]), st.one_of(st.none(), st.just(1 << 21))
)
def test_a_page_is_aligned_and_holds_its_content_at_every_block_size(layer, block_size, padded):
    changed = attrs.evolve(layer, page_size_padded=padded).copy_with_new_block_size(block_size)
    content = changed.num_states * changed.state_content_size_bytes
    page = changed.page_size_bytes
    assert page % (layer.alignment or 1) == 0
    assert max(content, padded or 0) <= page < max(content, padded or 0) + (layer.alignment or 1)
    assert (
        changed.copy_with_new_block_size(layer.block_size).unpadded_page_size_bytes
        == layer.unpadded_page_size_bytes
    )


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ({"alignment": 0}, "alignment", 0),
        ({"storage_block_size": 0}, "storage_block_size", 0),
        ({"topk_buffer_width": -1}, "topk_buffer_width", -1),
        ({"cache_role": "keys"}, "cache_role", "keys"),
        ({"tokens_per_state": 48}, "tokens_per_state", 48),
    ],
)
def test_bad_values_are_refused_by_name(words, field, value):
    with pytest.raises(SpecError) as caught:
        latent(**words)
    assert (caught.value.field, caught.value.value) == (field, value)


def test_an_unknown_generation_of_windows_is_refused():
    with pytest.raises(SpecError, match=r"model_version = 'v9': must be one of None, 'deepseek_v4'"):
        window(model_version="v9")


# --- opaque rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache_dtype", "head_size", "mode", "content"),
    [
        ("fp8_ds_mla", 576, KVQuantMode.FP8_PER_TENSOR, 656),  # 512 e4m3 + 4 fp32 scales + 64 bf16
        ("fp8_ds_mla", 512, KVQuantMode.FP8_PER_TENSOR, 584),  # 448 e4m3 + 64 bf16 + 7 scales and a pad
        ("nvfp4_ds_mla", 576, KVQuantMode.NVFP4_DS_MLA, 352),  # 256 e2m1 pairs + 64 e4m3 + 32 scales
        ("nvfp4_ds_mla", 512, KVQuantMode.NVFP4_DS_MLA, 288),  # 256 e2m1 pairs + 32 scales
    ],
)
def test_opaque_rows(cache_dtype, head_size, mode, content):
    dtype = load_plugins(extra=[kvframe_mla]).cache_dtypes.get(cache_dtype)
    for layer in (latent, window):
        row = packed(layer(head_size=head_size, dtype=dtype.element_dtype("bfloat16")), dtype)
        assert (row.kv_quant_mode, row.num_heads, row.state_content_size_bytes) == (mode, 1, content)
    assert row_bytes(cache_dtype, head_size) == content
    assert dtype.serves("mla")
    assert dtype.serves("sliding_window_mla")
    assert not dtype.serves("full_attention")


def test_a_vector_without_a_row_is_refused():
    with pytest.raises(SpecError, match=r"fp8_ds_mla\.head_size = 128: must be 576 or 512"):
        row_bytes("fp8_ds_mla", 128)


# --- windows ---------------------------------------------------------------------------------------------------------


def test_a_window_of_latent_rows_is_sized_as_a_window():
    # w = 128, F = 2048, block 64: ceil(2175 / 64) + 1 = 35 pages of 64 * 1152 bytes
    engine = EngineConfig(max_model_len=4096, max_in_flight_tokens=2048)
    assert window().max_memory_usage_bytes(engine) == 35 * 73_728
    assert window(**V4).page_size_bytes == 149_760  # 256 * 584 = 149504 -> 260 * 576


def test_bounded_replay_computes_the_window_again():
    replay = window(bounded_replay=True)
    assert (replay.prefix_cacheable, replay.prefix_replay_tokens) == (False, 128)
    assert (window().prefix_cacheable, window().prefix_replay_tokens) == (True, 0)
    assert (WINDOW.lifetime(replay).hits, WINDOW.lifetime(window()).hits) == ("free", "keyed")
    assert WINDOW.lifetime(replay).dead(1000, 1) == (0, (1000 - 128 + 1) // 64)


@pytest.mark.parametrize(
    "words", [{}, {"bounded_replay": True, "extra_retained_tokens": 3, "alignment": 512}]
)
def test_promotion_to_latent_full_attention(words):
    stand_in = WINDOW.promote(window(**words), 128)
    assert stand_in == latent(block_size=128, sliding_window=128, alignment=words.get("alignment"))
    assert MLA.promote(latent(), 128) == latent()


# --- merge and tables ------------------------------------------------------------------------------------------------


@given(st.one_of(latents, windows))
def test_specs_are_values_and_equal_layers_merge(layer):
    assert pickle.loads(pickle.dumps(layer)) == layer
    assert {layer: 1}[attrs.evolve(layer)] == 1
    assert family(layer).merge({"a": layer, "b": layer, "c": layer}) == layer


def test_specs_print_short():
    assert repr(latent()) == "MLAAttentionSpec(64, num_kv_heads=1, head_size=576, dtype='bfloat16')"


@given(st.lists(st.one_of(st.none(), st.sampled_from([64, 576, 4096])), min_size=2, max_size=4))
def test_alignments_merge_in_any_order_or_not_at_all(alignments):
    layers = {str(index): latent(alignment=value) for index, value in enumerate(alignments)}
    results = [MLA.merge(dict(order)) for order in itertools.permutations(layers.items())]
    assert all(result == results[0] for result in results)
    asked = set(alignments) - {None}
    # a page of 73728 bytes is a multiple of 64, 576 and 4096: the layers differ in what they ask for only
    assert all(73_728 % value == 0 for value in asked)
    assert isinstance(results[0], Refusal) == (len(asked) > 1)
    if len(asked) == 1:
        assert results[0] == latent(alignment=asked.pop())


@pytest.mark.parametrize("layer", [latent(**V4, tokens_per_state=4), window(**V4)])
def test_an_alignment_never_changes_another_layers_page(layer):
    bare = attrs.evolve(layer, alignment=None)
    for layers in ({"a": layer, "b": bare}, {"b": bare, "a": layer}):
        refusal = family(layer).merge(layers)
        assert isinstance(refusal, Refusal)
        assert (refusal.field, refusal.layers) == ("alignment", {"576": ("a",), "None": ("b",)})


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("block_size", 128),
        ("num_kv_heads", 2),
        ("head_size", 512),
        ("dtype", "float16"),
        ("kv_quant_mode", KVQuantMode.FP8_PER_TENSOR),
        ("model_version", "deepseek_v4"),
        ("cache_dtype_str", "fp8_ds_mla"),
        ("tokens_per_state", 4),
    ],
)
def test_a_conflict_names_the_field_and_its_layers(word, value):
    for make in (latent, window):
        layers = {"a": make(), "b": make(**{word: value})}
        refusal = family(layers["a"]).merge(layers)
        assert isinstance(refusal, Refusal)
        assert refusal.field == word
        assert set(refusal.layers.values()) == {("a",), ("b",)}


def test_tables():
    full = FullAttentionSpec(64, num_kv_heads=8, head_size=128, dtype="bfloat16")
    indexer = latent(head_size=132, dtype="uint8", cache_role="indexer")
    assert MLA.table_key(latent()) == MLA.table_key(indexer) == full_attention_family().table_key(full)
    assert WINDOW.table_key(window()) == WINDOW.table_key(window(head_size=512))
    assert WINDOW.table_key(window()) != WINDOW.table_key(window(bounded_replay=True))
    assert WINDOW.table_key(window()) != WINDOW.table_key(window(extra_retained_tokens=2))


def test_latent_windows_do_not_mix_with_plain_ones():
    import kvframe_sliding_window

    plain = kvframe_sliding_window.SlidingWindowSpec(
        64, num_kv_heads=1, head_size=576, dtype="bfloat16", sliding_window=128
    )
    (plain_family,) = kvframe_sliding_window.kvframe_spec_families()
    assert plain_family.table_key(plain) != WINDOW.table_key(window())
    assert isinstance(WINDOW.merge({"a": plain, "b": window()}), Refusal)
    assert isinstance(WINDOW.merge({"b": window(), "a": plain}), Refusal)


def test_a_stride_of_whole_rows_for_two_formats():
    # rows of 528 and 288 bytes in one stride: lcm = 3168 (contract 2.4)
    layer = latent(block_stride_alignment=math.lcm(528, 288))
    assert layer.block_stride_bytes_multiple == 3168
