"""kvframe against the figures of a real engine: specs, merge, uniform, quant, packing, seed.

Every case is compared as it stands, but for the rules that are functions of this module: each says, over a case's
input, where kvframe answers better than the figures' source, and what it answers. "Q" points to contract 8, "README" to
the quirks in the vectors' README.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import attrs
import pytest

from kvframe import (
    KVFrameError,
    KVQuantMode,
    PluginHost,
    Refusal,
    UniformTypeKVCacheSpecs,
    is_full_attention_spec,
    load_plugins,
)
from kvframe.checks import round_up
from kvframe.errors import SpecError, UnknownCacheDTypeError
from kvframe.packing import packed, two_planes
from kvframe.planning.grouping import make_group, merged, same_table
from kvframe.planning.paging import unify_pages
from kvframe.planning.sizing import tp_replicas
from kvframe.quant import get_kv_quant_mode, kv_cache_uses_per_token_head_scales
from tests.vectors import engine_of, load, params, quant_mode_of, spec_class, spec_of, specs_of

Words = Mapping[str, Any]
REFUSED = "refused"

# What kvframe does where the figures' source is known to be wrong, by the files' tags; the rules below apply it by
# input, so that cases without a tag are held to it too.
QUIRKS: Mapping[str, str] = {
    "bad_padding_found_late": "padding below the page is refused at construction",
    "tokens_of_block_not_covered": "a block that holds no whole number of states is refused at construction",
    "zero_size_page": "a block or a state of no size is refused at construction",
    "chunk_bound_too_small": "the bound has one more block",
    "dropped": "the merge keeps the field",
    "identical_layers_refused": "equal layers merge to an equal spec",
    "page_size_mismatch": "layers with different geometry are refused",
    "family_absorbed": "kinds never merge into one",
    "sink_len_ignored": "different sinks are refused",
    "predicate_raises": "the answer is yes or no, never an error",
    "same_spec_but_different_page_sizes": "layers with different geometry are refused",
    "same_spec_depends_on_order": "the answer is the same in any order",
    "same_type_depends_on_order": "the answer is the same in any order",
    "unknown_name_key_error": "an unknown name is an UnknownCacheDTypeError",
    "unknown_name_not_refused": "an unknown name is an UnknownCacheDTypeError",
    "custom_mode_is_an_alias_of_octave_k3v4": "not run: the mode is outside the seed",
}


@pytest.mark.parametrize("stem", ["specs", "merge", "uniform", "quant", "packing", "seed"])
def test_every_quirk_has_an_answer(stem: str) -> None:
    tags = {tag.partition(":")[0] for case in load(stem) for tag in case.get("quirk", ())}
    assert tags <= set(QUIRKS)


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return load_plugins()


def outcome(function: Callable[[], Any]) -> Any:
    """What a call gives; REFUSED where kvframe refuses."""
    try:
        return function()
    except KVFrameError:
        return REFUSED


def figure(value: Any) -> Any:
    """A figure, where an error of any class is REFUSED."""
    return REFUSED if isinstance(value, dict) and "error" in value else value


def word_of(value: int | Fraction) -> int | str:
    """A fraction as the files write it."""
    return value if isinstance(value, int) else f"{value.numerator}/{value.denominator}"


def figures(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: figure(value) for name, value in values.items()}


# --- specs -----------------------------------------------------------------------------------------------------------


def leaves_a_rest(words: Words, tokens: int) -> bool:
    """Q16: `tokens` that hold no whole number of states would leave some without storage: refused, not floored."""
    return (Fraction(tokens) / Fraction(words.get("tokens_per_state", 1))).denominator != 1


def is_refused_at_construction(words: Words) -> bool:
    """Q8, Q16: what cannot be right is refused when the spec is built, not when a figure of it is read."""
    if words["block_size"] < 1 or leaves_a_rest(words, words["block_size"]):
        return True
    if words["family"] == "mamba" and not words["shapes"]:
        return True
    padded = words.get("page_size_padded")
    return padded is not None and padded < spec_of({**words, "page_size_padded": None}).page_size_bytes


def page_size_padded(spec: Any) -> int | None:
    """Q7: padding that follows from the alignment is derived; the figures' source stores it."""
    if getattr(spec, "alignment", None) is not None and spec.page_size_bytes > spec.unpadded_page_size_bytes:
        return int(spec.page_size_bytes)
    return getattr(spec, "page_size_padded", None)


def page_at(spec: Any, block: int) -> int:
    return int(spec.copy_with_new_block_size(block).page_size_bytes)


def expected_page_at(words: Words, block: int, page: Any) -> Any:
    """Q7: padding that no longer holds the page of a new block size grows with it; the figures' source fails."""
    padded, alignment = words.get("page_size_padded"), words.get("alignment")
    if leaves_a_rest(words, block):
        return REFUSED
    if page != REFUSED or (padded is None and alignment is None):
        return page
    bare = {word: value for word, value in words.items() if word not in ("page_size_padded", "alignment")}
    return round_up(max(padded or 0, page_at(spec_of(bare), block)), alignment or 1)


def straddling_blocks(words: Words) -> int:
    """lifetime.md, "Peak": chunks that are no multiple of the block take one more block than the figures say."""
    return int(
        words["family"] == "chunked_local" and words["attention_chunk_size"] % words["block_size"] != 0
    )


def properties_of(spec: Any, names: Mapping[str, Any], host: PluginHost) -> dict[str, Any]:
    family = host.family(spec)
    special: dict[str, Callable[[], Any]] = {
        "kind": lambda: family.traits.event_kind,
        "event_sliding_window": lambda: family.window(spec),
        "is_sliding_window_family": lambda: isinstance(spec, spec_class("sliding_window")),
        "is_full_attention_family": lambda: is_full_attention_spec(spec),
        "page_size_padded": lambda: page_size_padded(spec),
        "tokens_per_state": lambda: word_of(spec.tokens_per_state),
    }
    return {name: outcome(special.get(name, partial(getattr, spec, name))) for name in names}


def per_setup_of(spec: Any, setup: Words) -> dict[str, Any]:
    engine = engine_of(setup)
    tokens, length = engine.max_in_flight_tokens, engine.max_model_len
    result = {
        "max_in_flight_tokens": tokens,
        "max_memory_usage_bytes": outcome(lambda: spec.max_memory_usage_bytes(engine)),
        "block_table_width": outcome(lambda: spec.max_num_blocks_per_req(engine, length)),
    }
    if hasattr(spec, "max_admission_blocks_per_request"):
        result["max_admission_blocks"] = spec.max_admission_blocks_per_request(tokens, length)
    return result


def expected_per_setup(words: Words, expect: Words, page: int) -> dict[str, Any]:
    wanted = figures(expect)
    extra = straddling_blocks(words)
    if extra:
        wanted["max_admission_blocks"] += extra
        wanted["max_memory_usage_bytes"] += extra * page
    return wanted


@pytest.mark.parametrize("case", params("specs", lambda case: "layer" in case["input"]))
def test_spec(case: dict[str, Any], host: PluginHost) -> None:
    words, expect = case["input"]["layer"], case["expect"]
    if "constructor_error" in expect or is_refused_at_construction(words):
        with pytest.raises(SpecError):
            spec_of(words)
        return
    spec = spec_of(words)
    family = host.family(spec)
    assert properties_of(spec, expect["properties"], host) == figures(expect["properties"])
    for setup, wanted in zip(case["input"]["setups"], expect["per_setup"], strict=True):
        assert per_setup_of(spec, setup) == expected_per_setup(words, wanted, spec.page_size_bytes)
    multiple = spec.block_stride_bytes_multiple
    assert multiple == expect["block_stride_alignment_bytes"]
    assert round_up(spec.page_size_bytes, multiple) == expect["layer_block_stride_bytes"]
    for tokens, states in expect["kernel_states"].items():
        wanted = REFUSED if leaves_a_rest(words, int(tokens)) else figure(states)
        assert outcome(partial(spec.kernel_states, int(tokens))) == wanted
    for block, page in expect["page_at_block_size"].items():
        wanted = expected_page_at(words, int(block), figure(page))
        assert outcome(partial(page_at, spec, int(block))) == wanted
    for dcp, tokens in expect["tokens_per_cache_block_at_dcp"].items():
        assert family.engine_lifetime(spec, engine_of({"dcp": int(dcp)})).block == tokens
    for ranks, replicas in expect["tp_replicas"].items():
        tp, dcp = map(int, re.findall(r"\d+", ranks))  # as "tp8_dcp2"
        assert tp_replicas([make_group({"layer": spec}, host)], engine_of({"tp": tp, "dcp": dcp})) == replicas


@pytest.mark.parametrize("case", params("specs", lambda case: "fn" in case["input"]))
def test_checkpoint(case: dict[str, Any]) -> None:
    spec_class("mamba")  # or not run
    from kvframe_mamba import get_mamba_prefill_checkpoint_position, is_mamba_prefill_checkpoint_valid

    words = {word: value for word, value in case["input"].items() if word != "fn"}
    if "num_tokens" in words:
        lookahead = words.pop("num_hash_lookahead_tokens")
        assert get_mamba_prefill_checkpoint_position(**words, lookahead=lookahead) == case["expect"]
    else:
        assert is_mamba_prefill_checkpoint_valid(**words) is case["expect"]


# --- merge and uniform -----------------------------------------------------------------------------------------------

# Fields that any layer may set for the group, and those of which one value may be set; all others must be equal.
ANY_OF = ("non_causal", "non_causal_multi_token_decode")
SET_BY_ONE = ("alignment", "sliding_window", "attention_chunk_size")
LATENT = ("mla", "sliding_window_mla")


def values_of(name: str, specs: list[Any]) -> set[Any]:
    return {getattr(spec, name, None) for spec in specs} - {None}


def differing(specs: list[Any]) -> set[str]:
    """Names of the fields in which specs of one class differ."""
    fields = [field.name for field in attrs.fields(type(specs[0])) if field.eq]
    return {name for name in fields if len({getattr(spec, name) for spec in specs}) > 1}


def refused_merge(layers: list[Words], specs: list[Any]) -> bool:
    """Where the figures' source may merge and kvframe must not."""
    if len({words["family"] for words in layers}) > 1:
        return True  # Q4: a kind never absorbs another, whatever the order
    if layers[0]["family"] == "sink" and "sink_len" in differing(specs):
        return True  # README 3: the first layer's sink would win
    if layers[0]["family"] not in LATENT:
        return False
    if any(len(values_of(name, specs)) > 1 for name in SET_BY_ONE):
        return True  # Q6: one of two alignments, or of two windows, would be dropped
    if values_of("sliding_window", specs) and values_of("attention_chunk_size", specs):
        return True  # Q6: likewise
    # README 1: the first layer's geometry, quant mode and padding would win
    return bool(differing(specs) - {*ANY_OF, *SET_BY_ONE}) or len(values_of("page_size_bytes", specs)) > 1


def kept(merged_spec: Any, specs: list[Any]) -> Any:
    """Q6: what one layer sets survives, in any order; latent kinds and sinks drop some of it in the figures."""
    changes: dict[str, Any] = {name: True for name in ANY_OF if True in values_of(name, specs)}
    changes |= {name: value for name in SET_BY_ONE for value in values_of(name, specs)}
    return attrs.evolve(merged_spec, **changes)


def expected_merge(layers: list[Words], specs: list[Any], expect: Words) -> Any:
    """The merged spec by the figures and the rules above, or REFUSED."""
    if refused_merge(layers, specs):
        return REFUSED
    if not differing(specs) - set(ANY_OF):
        return kept(specs[0], specs)  # Q6: merging equal layers loses nothing
    if "error" in expect:
        return REFUSED
    return kept(spec_of(expect["merged"]), specs)


@pytest.mark.parametrize("case", params("merge"))
def test_merge(case: dict[str, Any], host: PluginHost) -> None:
    layers, expect = case["input"]["layers"], case["expect"]
    specs = specs_of(layers)
    wanted = expected_merge(layers, list(specs.values()), expect)
    for order in (specs, dict(reversed(specs.items()))):
        result = merged(order, host)
        if wanted == REFUSED:
            assert isinstance(result, Refusal)
            assert sorted(layer for names in result.layers.values() for layer in names) == sorted(specs)
        else:
            assert result == wanted
    if wanted != REFUSED and "merged" in expect:
        assert wanted.page_size_bytes == expect["merged"]["page_size_bytes"]


def expected_same_table(layers: list[Words], expect: Any) -> bool:
    """Whether the layers may share a block table, by the figures and where they hold what must not be shared."""
    families = {words["family"] for words in layers}

    def differ(word: str, default: Any = None) -> bool:
        return len({words.get(word, default) for words in layers}) > 1

    if "encoder_only" in families:
        return families == {"encoder_only"} and not differ(
            "block_size"
        )  # README: the figures' predicate raises
    if "rswa" in families and (len(families) > 1 or differ("rswa_window")):
        return False  # Q4: the widest layer would lose blocks that it still reads
    if families <= {"sliding_window", "sliding_window_mla"} and (
        len(families) > 1 or differ("extra_retained_tokens", 0)
    ):
        return False  # Q15: kinds of windows do not mix in any order, and retained tokens are part of what is kept
    if families == {"mamba"} and differ("mamba_cache_mode", "none"):
        return False  # Q14: a state that is kept at block borders and one that is not
    if families == {"hisparse_hot"} and differ("blocks_per_request"):
        return False  # contract 2.18: rows of a group are equally long
    return bool(expect)


def group_of(specs: dict[str, Any], host: PluginHost) -> dict[str, Any]:
    """The figures of a group of layers that keep their own pages (contract 2.18)."""
    group = UniformTypeKVCacheSpecs(specs)
    families = [host.family(spec) for spec in specs.values()]
    kinds = {family.traits.event_kind for family in families}
    full = is_full_attention_spec(group)
    windows = {family.window(spec) for family, spec in zip(families, specs.values(), strict=True)}
    names = ["page_size_bytes", "max_layers_per_page_size", "prefix_cacheable", "prefix_replay_tokens"]
    names += ["uses_slot_mapping", "dcp_sharded", "block_table_token_alignment"]
    return {
        **{name: getattr(group, name) for name in names},
        "is_full_attention": full,
        "kind": kinds.pop() if len(kinds) == 1 else "full_attention" if full else "unknown",
        "event_sliding_window": windows.pop() if len(windows) == 1 else None,
    }


def group_per_setup(specs: dict[str, Any], setup: Words) -> dict[str, Any]:
    group, engine = UniformTypeKVCacheSpecs(specs), engine_of(setup)
    return {
        "max_memory_usage_pages": outcome(lambda: group.max_memory_usage_pages(engine)),
        "max_memory_usage_bytes": outcome(lambda: group.max_memory_usage_bytes(engine)),
        "block_table_width": outcome(lambda: group.max_num_blocks_per_req(engine, engine.max_model_len)),
    }


def expected_group_per_setup(layers: list[Words], expect: Words, page: int) -> dict[str, Any]:
    wanted = figures(expect)
    extra = max(map(straddling_blocks, layers))
    if extra:
        wanted["max_memory_usage_pages"] += extra
        wanted["max_memory_usage_bytes"] += extra * page
    return wanted


@pytest.mark.parametrize("case", params("uniform"))
def test_same_spec_and_same_table(case: dict[str, Any], host: PluginHost) -> None:
    layers, expect = case["input"]["layers"], case["expect"]
    specs = specs_of(layers)
    listed = list(specs.values())
    same_spec = {"merged": layers[0]} if expect["same_spec"] is True else {"error": "refused"}
    assert isinstance(merged(specs, host), Refusal) == (expected_merge(layers, listed, same_spec) == REFUSED)
    shared = expected_same_table(layers, figure(expect["same_type"]))
    for order in (specs, dict(reversed(specs.items()))):
        assert same_table(order, host) is shared
    if shared and "group" in expect:
        wanted = dict(expect["group"])
        per_setup = wanted.pop("per_setup")
        assert group_of(specs, host) == wanted
        for setup, figures_of_setup in zip(case["input"]["setups"], per_setup, strict=True):
            expected = expected_group_per_setup(layers, figures_of_setup, wanted["page_size_bytes"])
            assert group_per_setup(specs, setup) == expected


def padding_must_grow(specs: list[Any]) -> bool:
    """Q7: the figures' source fails where the block of a padded layer grows; kvframe brings it to the common page."""
    target = max(spec.page_size_bytes for spec in specs)
    return any(
        page_size_padded(spec) is not None
        and spec.page_size_bytes != target
        and target % spec.page_size_bytes == 0
        for spec in specs
    )


@pytest.mark.parametrize("case", params("uniform"))
def test_page_unification(case: dict[str, Any], host: PluginHost) -> None:
    expect = case["expect"]["unified_pages"]
    specs = specs_of(case["input"]["layers"])
    result = unify_pages(specs, host)
    if figure(expect) == REFUSED and padding_must_grow(list(specs.values())):
        assert isinstance(result, Refusal) or len(values_of("page_size_bytes", list(result.values()))) == 1
        return
    if figure(expect) == REFUSED:
        assert isinstance(result, Refusal)
        return
    assert not isinstance(result, Refusal)
    pages = [
        {
            "block_size": spec.block_size,
            "page_size_bytes": spec.page_size_bytes,
            "page_size_padded": page_size_padded(spec),
        }
        for spec in result.values()
    ]
    assert pages == expect


# --- quant and packing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", params("quant"))
def test_quant(case: dict[str, Any], host: PluginHost) -> None:
    name, expect = case["input"]["cache_dtype"], case["expect"]
    if not expect["accepted_option"]:
        # README 7, Q19: a name that nobody claims is refused, never "not quantised"
        with pytest.raises(UnknownCacheDTypeError):
            get_kv_quant_mode(name, host)
        return
    mode = quant_mode_of(expect["mode"])
    assert get_kv_quant_mode(name, host) is mode
    assert kv_cache_uses_per_token_head_scales(name, host) is expect["uses_per_token_head_scales"]
    assert mode == expect["value"]
    flags = ("is_per_token_head", "is_nvfp4", "is_turboquant")
    assert {flag: getattr(mode, flag) for flag in flags} == {flag: expect[flag] for flag in flags}
    cache_dtype = host.cache_dtypes.get(name)
    assert cache_dtype.is_quantized is expect["is_quantized"]
    assert cache_dtype.storage == expect.get("storage_dtype")


PER_TOKEN_HEAD = {mode for mode in KVQuantMode if mode.is_per_token_head}
# The modes whose cells a kernel family packs; a spec of another mode comes back as it is.
PACKED_BY: Mapping[str, set[KVQuantMode]] = {
    "triton": PER_TOKEN_HEAD,
    "mla_common": PER_TOKEN_HEAD,
    "flashinfer": {KVQuantMode.NVFP4},
    "turboquant": {mode for mode in KVQuantMode if mode.is_turboquant},
    "octave": set(),
}


def repack(spec: Any, kernels: str, host: PluginHost) -> Any:
    if kernels == "split_kv_planes":
        return two_planes(spec)
    if spec.kv_quant_mode not in PACKED_BY[kernels]:
        return spec
    cache_dtype = next(dtype for dtype in host.cache_dtypes if dtype.mode is spec.kv_quant_mode)
    return packed(spec, cache_dtype)


@pytest.mark.parametrize("case", params("packing"))
def test_packing(case: dict[str, Any], host: PluginHost) -> None:
    expect = case["expect"]
    spec = spec_of(case["input"]["layer"])
    if "error" in expect:
        with pytest.raises(SpecError):
            repack(spec, case["input"]["packing"], host)
        return
    result = repack(spec, case["input"]["packing"], host)
    assert result.num_heads == expect["num_heads"]
    assert result.state_content_size_bytes == expect["state_content_bytes"]
    assert result.page_size_bytes == expect["page_size_bytes"]
    assert (result != spec) is expect["changed"]
    assert repack(result, case["input"]["packing"], host) == result  # packing twice changes nothing more


# --- seed: kvframe's default where seed and 0.33 differ -------------------------------------------------------------


@pytest.mark.parametrize("case", params("seed", lambda case: case["input"].get("fn") is not None))
def test_seed_checkpoint(case: dict[str, Any]) -> None:
    spec_class("mamba")  # or not run
    from kvframe_mamba import get_mamba_prefill_checkpoint_position

    words = {word: value for word, value in case["input"].items() if word != "fn"}
    assert get_mamba_prefill_checkpoint_position(**words) == case["expect"]["seed"]
    assert get_mamba_prefill_checkpoint_position(**words, lookahead=0) == case["expect"]["v033"]


@pytest.mark.parametrize("case", params("seed", lambda case: "cache_dtype" in case["input"]))
def test_seed_quant(case: dict[str, Any], host: PluginHost) -> None:
    mode = quant_mode_of(case["expect"]["v033"])
    assert get_kv_quant_mode(case["input"]["cache_dtype"], host) is mode
    assert case["expect"]["seed"] == case["expect"]["v033"]


@pytest.mark.parametrize("case", params("seed", lambda case: "layers" in case["input"]))
def test_seed_storage_block(case: dict[str, Any], host: PluginHost) -> None:
    result = merged(specs_of(case["input"]["layers"]), host)
    if "error" in case["expect"]:
        assert isinstance(result, Refusal)
        return
    wanted = case["expect"]
    assert result.storage_block_size == wanted["storage_block_size"]
    assert result.page_size_bytes == wanted["page_size_bytes"]
