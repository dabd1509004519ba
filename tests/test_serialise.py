"""Plans as JSON: exact, canonical, and refused with a reason wherever they are not what was written."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from enum import Enum
from fractions import Fraction
from types import ModuleType
from typing import Any, Literal

import attrs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvframe import (
    FullAttentionSpec,
    KVQuantMode,
    Lifetime,
    MultipleOf,
    PluginHost,
    SpecFamily,
    UniformTypeKVCacheSpecs,
    hookimpl,
    kv_field,
)
from kvframe.discovery import Filters
from kvframe.dtypes import element_size
from kvframe.errors import LayoutError, MissingPluginError, PlanError, PlanFormatError, SpecError
from kvframe.layout import KVCacheLayout
from kvframe.serialise import fingerprint, from_json, to_json
from kvframe_mla import MLAAttentionSpec, SparseCacheRole
from tests.plans import FULL, HOST, MLA, group_of, mixed, plan_of
from tests.spec_examples import EVERY, EXAMPLES


def same(one, other):
    """Equal in everything, flags that equality leaves out and the order of layers included."""
    return one == other and to_json(one) == to_json(other)


# --- what is written comes back ---


def test_a_plan_comes_back():
    config = mixed()
    assert same(from_json(to_json(config)), config)


@pytest.mark.parametrize("name", EVERY)
def test_every_family_s_specs_come_back(name):
    for spec in EVERY[name]:
        config = plan_of(group_of({"layer": spec}))
        read = from_json(to_json(config))
        assert same(read, config)
        (back,) = read.groups[0].layer_specs.values()
        assert type(back) is type(spec)
        assert attrs.asdict(back) == attrs.asdict(spec)
        assert [type(value) for value in attrs.astuple(back, recurse=False)] == [
            type(value) for value in attrs.astuple(spec, recurse=False)
        ]


def test_a_group_of_several_page_sizes_comes_back_in_the_order_of_its_layers():
    wide = attrs.evolve(FULL, head_size=16)
    config = plan_of(group_of({"z": wide, "a": FULL, "m": wide}))
    read = from_json(to_json(config))
    spec = read.groups[0].kv_cache_spec
    assert isinstance(spec, UniformTypeKVCacheSpecs)
    assert list(spec.kv_cache_specs) == list(read.groups[0].layer_specs) == ["z", "a", "m"]
    assert spec.kv_cache_specs["m"] == wide
    assert len(json.loads(to_json(config))["specs"]) == 2  # equal specs are written once


def test_a_rank_s_empty_group_keeps_its_spec():
    whole = mixed()
    empty = attrs.evolve(whole.groups[0], layer_specs={})
    config = plan_of(empty, whole.groups[1])
    read = from_json(to_json(config))
    assert same(read, config)
    assert list(read.groups[0].kv_cache_spec.kv_cache_specs) == ["a", "b"]


def test_draft_layers_stay_draft_layers():
    draft = attrs.evolve(FULL, is_draft=True)
    config = plan_of(group_of({"a": FULL, "b": draft}))
    read = from_json(to_json(config))
    assert [spec.is_draft for spec in read.groups[0].layer_specs.values()] == [False, True]
    assert fingerprint(config) != fingerprint(plan_of(group_of({"a": FULL, "b": FULL})))


ATTENTION: dict[str, Any] = {
    "block_size": st.sampled_from([8, 16, 48, 64]),
    "num_kv_heads": st.integers(1, 9),
    "head_size": st.integers(1, 600),
    "dtype": st.sampled_from(["bfloat16", "float32", "uint8", "float8_e4m3fn"]),
    "dcp_sharded": st.booleans(),
    "is_draft": st.booleans(),
    "block_stride_alignment": st.none() | st.sampled_from([1, 256, MultipleOf(8), MultipleOf(16)]),
    "max_tp_shards": st.none() | st.integers(1, 8),
    "kv_quant_mode": st.sampled_from(KVQuantMode),
    "num_head_slots": st.none() | st.integers(1, 16),
    "state_content_bytes": st.none() | st.integers(1, 2_000),
    "tokens_per_state": st.sampled_from([1, 2, 4, 8, Fraction(1, 2), Fraction(1, 3), Fraction(4, 1)]),
}


def specs_of(cls, padding, **fields):
    """Specs of a class, some with a padded page."""

    @st.composite
    def draw_spec(draw):
        values = {name: draw(values) for name, values in {**ATTENTION, **fields}.items()}
        spec = cls(**values)
        extra = draw(padding)
        return attrs.evolve(spec, page_size_padded=spec.unpadded_page_size_bytes + extra) if extra else spec

    return draw_spec()


FULL_SPECS = specs_of(
    FullAttentionSpec,
    st.none() | st.integers(1, 512),
    head_size_v=st.none() | st.integers(0, 600),
    sliding_window=st.none() | st.integers(1, 10_000),
    non_causal=st.booleans(),
)
MLA_SPECS = specs_of(
    MLAAttentionSpec,
    st.none() | st.integers(1, 512),
    alignment=st.none() | st.sampled_from([16, 576]),
    cache_dtype_str=st.none() | st.text(max_size=5),
    model_version=st.none() | st.just("deepseek_v4"),
    cache_role=st.sampled_from(SparseCacheRole),
    is_index_group_leader=st.booleans(),
    topk_buffer_width=st.none() | st.integers(1, 4_096),
)


@settings(max_examples=100, deadline=None)
@given(FULL_SPECS | MLA_SPECS, st.text(min_size=1, max_size=8))
def test_any_attention_spec_comes_back(spec, layer):
    # every cell must hold whole elements, or no plan of it can be viewed
    assume(spec.state_content_size_bytes % element_size(spec.dtype) == 0)
    config = plan_of(group_of({layer: spec}), layout="BLHNC")
    read = from_json(to_json(config))
    assert same(read, config)
    assert attrs.asdict(read.groups[0].layer_specs[layer]) == attrs.asdict(spec)


# --- the text ---


def test_the_text_of_a_small_plan():
    """Pinned: another text for the same plan is another format, and needs a new `FORMAT`."""
    config = plan_of(group_of({"a": FULL}), slabs=2)
    spec = (
        '{"family":"full_attention","fields":{"attention_chunk_size":null,"block_size":16,'
        '"block_stride_alignment":null,"dcp_sharded":true,"dtype":"bfloat16","head_size":8,"head_size_v":null,'
        '"is_draft":false,"kv_quant_mode":0,"max_tp_shards":null,"non_causal":false,"num_head_slots":null,'
        '"num_kv_heads":2,"page_size_padded":null,"sliding_window":null,"state_content_bytes":null,'
        '"tokens_per_state":1},"geometry":{"page_bytes":1024,"shape":[2,16,32]}}'
    )
    provider = f'{{"distribution":"kvframe","version":"{core_version()}"}}'
    text = (
        '{"cache_hit_alignment_tokens":null,"format":"kvframe-plan/1","groups":[{"blocks_per_slab":1,'
        '"enable_kv_transfer":true,"family":["full_attention"],"is_eagle_group":false,"layers":[["a",0]],'
        '"needs_zeroing":false,"pool":"device","role":"default","spec":0}],"hash_block_size":null,'
        '"kv_tp_replicas":1,"max_model_len":64,"pools":[{"budget_bytes":2048,"layout":"BLHNC","name":"device",'
        '"num_slabs":2,"reserved_slabs":1,"shared_by_ranks":1,"slab_bytes":1024}],'
        '"prefix_cache_retention_interval":null,'
        f'"providers":{{"families":{{"full_attention":{provider}}},"layouts":{{"BLHNC":{provider}}}}},'
        f'"specs":[{spec}],"tensors":[{{"block_stride":1024,"layer_stride":1024,"layers":["a"],"offset":0,'
        '"pool":"device","size":2048}]}'
    )
    assert to_json(config) == text
    assert fingerprint(config) == hashlib.sha256(text.encode()).hexdigest()


def core_version():
    from kvframe import __version__

    return __version__


def test_tools_that_know_no_kvframe_can_read_it():
    """log.md rows 44 and 45: block size, shape, dtype and compression of every group, not of the first alone."""
    plan = json.loads(to_json(mixed()))
    group = plan["groups"][1]
    spec = plan["specs"][group["spec"]]
    assert (group["layers"], spec["family"]) == ([["c", group["spec"]]], "mla")
    assert (spec["fields"]["block_size"], spec["fields"]["dtype"]) == (16, "bfloat16")
    assert spec["fields"]["tokens_per_state"] == 1
    assert spec["geometry"] == {"page_bytes": 512, "shape": [1, 16, 32]}  # 16 elements of 2 bytes
    assert plan["providers"]["families"]["mla"]["distribution"] == "kvframe-mla"


def test_values_are_written_in_the_stated_forms():
    def fields(spec):
        return json.loads(to_json(plan_of(group_of({"a": spec}))))["specs"][0]["fields"]

    assert fields(attrs.evolve(FULL, tokens_per_state=Fraction(1, 4)))["tokens_per_state"] == "1/4"
    assert fields(attrs.evolve(FULL, tokens_per_state=Fraction(4)))["tokens_per_state"] == 4
    aligned = fields(attrs.evolve(FULL, block_stride_alignment=MultipleOf(8)))
    assert aligned["block_stride_alignment"] == {"MultipleOf": {"tokens": 8}}
    assert fields(attrs.evolve(FULL, kv_quant_mode=KVQuantMode.NVFP4))["kv_quant_mode"] == 5
    assert fields(attrs.evolve(MLA, cache_role=SparseCacheRole.INDEXER))["cache_role"] == "indexer"
    assert fields(EXAMPLES["mamba"][0])["shapes"] == [[3, 4_096], [64, 64, 128]]
    raw = json.loads(to_json(plan_of(group_of({"h": EXAMPLES["hisparse_hot"][0]}))))["specs"][0]
    assert raw["geometry"] == {"page_bytes": 41_984, "shape": None}


def test_spaces_and_order_of_keys_do_not_matter_to_the_reader():
    config = mixed()
    loose = json.dumps(json.loads(to_json(config)), indent=4, sort_keys=False)
    assert same(from_json(loose), config)


def test_names_beyond_ascii_come_back():
    config = plan_of(group_of({"Schicht 0 · é 🧠": FULL}))
    assert to_json(config).isascii()
    assert same(from_json(to_json(config)), config)


# --- fingerprints ---


def test_the_order_in_which_pools_were_made_does_not_matter():
    config = mixed()
    pools = dict(reversed(config.pools.items()))
    assert list(pools) != list(config.pools)
    assert fingerprint(attrs.evolve(config, pools=pools)) == fingerprint(config)


@pytest.mark.parametrize(
    "change",
    [
        {"max_model_len": 65},
        {"hash_block_size": 8},
        {"cache_hit_alignment_tokens": 16},
        {"kv_tp_replicas": 1},
        {"prefix_cache_retention_interval": None},
    ],
)
def test_every_number_counts(change):
    assert fingerprint(attrs.evolve(mixed(), **change)) != fingerprint(mixed())


def test_another_order_of_groups_or_layers_is_another_plan():
    config = mixed()
    assert fingerprint(attrs.evolve(config, groups=config.groups[::-1])) != fingerprint(config)
    group = config.groups[0]
    turned = attrs.evolve(group, layer_specs=dict(reversed(group.layer_specs.items())))
    assert fingerprint(attrs.evolve(config, groups=(turned, *config.groups[1:]))) != fingerprint(config)


PROGRAM = """
from tests.plans import mixed
from kvframe.serialise import fingerprint
print(fingerprint(mixed()))
"""


@pytest.mark.parametrize("seed", ["0", "1"])
def test_fingerprints_are_equal_in_every_process(seed):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.strip() == fingerprint(mixed()), run.stderr


def with_versions(**versions):
    """A host on which distributions have other versions."""
    host = PluginHost(filters=Filters())
    for record in host.records:
        record.version = versions.get((record.distribution or "").replace("-", "_"), record.version)
    return host


def test_another_version_of_a_plugin_in_use_is_noticed():
    config = mixed()
    newer = with_versions(kvframe_mla="99.0")
    assert fingerprint(config, newer) != fingerprint(config)
    assert same(from_json(to_json(config, newer)), config)  # it computes the same pages
    unused = with_versions(kvframe_mamba="99.0")
    assert fingerprint(config, unused) == fingerprint(config)


def test_a_plugin_that_computes_other_pages_refuses_the_plan():
    text = to_json(mixed(), with_versions(kvframe_mla="99.0"))
    other = text.replace('"page_bytes":512,"shape":[1,16,32]', '"page_bytes":512,"shape":[1,8,64]')
    assert other != text
    with pytest.raises(PlanFormatError, match=r"made by kvframe-mla 99\.0.* in use computes") as caught:
        from_json(other)
    assert caught.value.path.endswith(".geometry")


# --- families and layouts that the reader lacks ---


def test_a_family_that_is_not_installed_is_named_with_its_pip_command():
    text = to_json(mixed()).replace('"mla"', '"kv_teleport"').replace("kvframe-mla", "kvframe-teleport")
    with pytest.raises(MissingPluginError) as caught:
        from_json(text)
    assert caught.value.distribution == "kvframe-teleport"
    assert str(caught.value).endswith("pip install kvframe-teleport")
    assert "'kv_teleport'" in str(caught.value)


def test_a_plugin_that_was_left_out_is_named_with_the_reason():
    core = PluginHost(filters=Filters(without=("kvframe-mla", "kvframe-hidden-state")))
    with pytest.raises(MissingPluginError, match="left out by KVFRAME_DISABLE_PLUGINS") as caught:
        from_json(to_json(mixed()), core)
    assert caught.value.distribution == "kvframe-mla"
    plain = plan_of(group_of({"a": FULL}))
    assert same(from_json(to_json(plain), core), plain)


def plugin(name="extra", **hooks):
    """A module whose hooks give the results as they are."""
    module = ModuleType(name)
    for hook, result in hooks.items():
        setattr(module, hook, hookimpl(constant(result)))
    return module


def constant(result):
    def function():
        return result

    return function


def test_a_plugin_s_layout_is_part_of_the_plan():
    host = PluginHost([plugin(kvframe_layouts=[KVCacheLayout("tiled", order="BLHNC")])], Filters())
    config = plan_of(group_of({"a": FULL}), layout="tiled")
    assert same_on(host, config)
    with pytest.raises(MissingPluginError, match="layout 'tiled', which no installed plugin provides"):
        from_json(to_json(config, host))


def same_on(host, config):
    text = to_json(config, host)
    read = from_json(text, host)
    return read == config and to_json(read, host) == text


def test_engines_names_of_layouts_are_known():
    assert same_on(HOST, plan_of(group_of({"a": FULL}), layout="HND"))


# --- specs of other people's plugins ---


class Flavour(Enum):
    SWEET = "sweet"
    SALTED = "salted"


@attrs.frozen
class Recipe:
    grams: int
    flavour: Flavour = Flavour.SWEET


@attrs.frozen(kw_only=True, repr=False)
class CakeSpec(FullAttentionSpec):
    """Every type of field that a plan can hold."""

    flavour: Flavour = kv_field(default=Flavour.SWEET)
    shape: Literal["round", "square"] = kv_field(default="round")
    recipe: Recipe | None = kv_field(default=None)
    layers: tuple[tuple[int, str], ...] = kv_field(default=())
    ratio: Fraction = kv_field(default=Fraction(1, 3))
    anything: Any = kv_field(default=None)


@attrs.frozen(kw_only=True, repr=False)
class NamelessSpec(FullAttentionSpec):
    """A subclass whose plugin forgot to give it a family."""


@attrs.frozen(kw_only=True, repr=False)
class UnplainSpec(FullAttentionSpec):
    share: float = kv_field(default=0.5)


def family(name, spec_type, **fields):
    return SpecFamily(
        name=name, spec_type=spec_type, lifetime=lambda spec: Lifetime(block=spec.block_size), **fields
    )


def kitchen():
    families = [family("cake", CakeSpec), family("unplain", UnplainSpec)]
    return PluginHost([plugin("kitchen", kvframe_spec_families=families)], Filters())


def made_of(cls, **fields):
    return cls(16, num_kv_heads=2, head_size=8, dtype="bfloat16", **fields)


def test_a_plugin_s_spec_needs_nothing_for_json_but_declared_types():
    spec = made_of(
        CakeSpec,
        flavour=Flavour.SALTED,
        shape="square",
        recipe=Recipe(200, Flavour.SALTED),
        layers=((1, "top"), (2, "bottom")),
        ratio=Fraction(2),
        anything="candles",
    )
    host = kitchen()
    assert same_on(host, plan_of(group_of({"a": spec}, host=host)))
    plan = json.loads(to_json(plan_of(group_of({"a": spec}, host=host)), host))
    assert plan["providers"]["families"]["cake"] == {"distribution": None, "version": None}
    with pytest.raises(MissingPluginError, match="'cake', which no installed plugin provides"):
        from_json(to_json(plan_of(group_of({"a": spec}, host=host)), host))


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        (made_of(NamelessSpec), "no family of its own, and 'full_attention' makes another"),
        (made_of(UnplainSpec), "cannot be written"),
        (made_of(CakeSpec, anything=(1, 2)), "must be a whole number, text"),
        (made_of(CakeSpec, anything=Flavour.SWEET), "would be read as"),
        (made_of(CakeSpec, recipe=Recipe("200 g")), r"recipe\.Recipe\.grams = '200 g': must be int"),
        (made_of(CakeSpec, layers=((1,),)), "must be"),
    ],
)
def test_a_spec_that_would_not_come_back_is_refused_when_it_is_written(spec, rule):
    host = kitchen()
    with pytest.raises(PlanFormatError, match=rule) as caught:
        to_json(plan_of(group_of({"a": spec}, host=host)), host)
    assert type(spec).__name__ in caught.value.path


def test_a_plan_is_read_by_the_family_that_took_another_s_place():
    taken = family("npu_full_attention", FullAttentionSpec, replaces="full_attention")
    host = PluginHost([plugin("npu", kvframe_spec_families=[taken])], Filters())
    config = plan_of(group_of({"a": FULL}))
    read = from_json(to_json(config), host)
    assert read == config
    assert fingerprint(read, host) != fingerprint(config)


# --- text that is no plan ---


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "must be JSON"),
        ("{", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("1" * 10_000, "must be"),
        ("[]", "must be an object"),
        ('{"format":"kvframe-plan/1","a":1.0}', "must be a whole number"),
        ('{"format":"kvframe-plan/1","a":NaN}', "must be a whole number"),
        ('{"format":"kvframe-plan/1","format":"kvframe-plan/1"}', "must give every key once"),
        ('{"format":"kvframe-plan/1"}', "lacks"),
        ("{}", "the only form that kvframe"),
        ('{"format":"kvframe-plan/2"}', "the only form that kvframe"),
        (None, "must be JSON"),
    ],
)
def test_what_is_no_plan_is_refused(text, rule):
    with pytest.raises(PlanFormatError, match=rule) as caught:
        from_json(text)
    assert len(str(caught.value)) < 400


DROP = object()


def changed(plan, path, value):
    *way, last = path
    place = plan
    for step in way:
        place = place[step]
    if value is DROP:
        del place[last]
    elif last == "+":
        place.append(value)
    else:
        place[last] = value
    return json.dumps(plan)


@pytest.mark.parametrize(
    ("path", "value", "error", "says"),
    [
        (("surprise",), 1, PlanFormatError, r"\$ = .*unknown keys surprise"),
        (("max_model_len",), DROP, PlanFormatError, "lacks max_model_len"),
        (("specs",), DROP, PlanFormatError, "lacks specs"),
        (("max_model_len",), "64", PlanFormatError, r"\$\.max_model_len = '64': must be int"),
        (("max_model_len",), True, PlanFormatError, r"\$\.max_model_len = True: must be int"),
        (("max_model_len",), 0, SpecError, "at least 1"),
        (("hash_block_size",), "x", PlanFormatError, "hash_block_size"),
        (("pools",), {}, PlanFormatError, r"\$\.pools = {}: must be a list"),
        (("pools", 0, "num_slabs"), -1, SpecError, "num_slabs"),
        (("pools", 0, "num_slabs"), 400, PlanError, "lie in its pool"),
        (("pools", 0, "num_slabs"), DROP, PlanFormatError, r"\$\.pools\[0\].*lacks num_slabs"),
        (("pools", 0, "speed"), 1, PlanFormatError, "unknown keys speed"),
        (
            ("pools", 1, "name"),
            "device",
            PlanFormatError,
            r"\$\.pools\[1\]\.name = 'device': must be given once",
        ),
        (("pools", 0, "layout"), "LBHNC", PlanError, "blocks of different slabs"),
        (("pools", 0, "layout"), "LBHXX", LayoutError, "no layout has this name"),
        (("providers", "layouts"), [], PlanFormatError, "must be an object"),
        (("providers", "dtypes"), {}, PlanFormatError, "unknown keys dtypes"),
        (("providers", "families", "mla", "version"), 1, PlanFormatError, "must be text or null"),
        (("providers", "families", "mla", "path"), "x", PlanFormatError, "unknown keys path"),
        (("providers", "families", "mla"), DROP, PlanFormatError, "one of .*families"),
        (("specs", 0, "family"), "mla", PlanFormatError, "has unknown keys|lacks"),
        (("specs", 0, "family"), ["mla"], PlanFormatError, "one of .*families"),
        (("specs", 0, "fields", "head_size"), 0, SpecError, "head_size"),
        (("specs", 0, "fields", "head_size"), 12, PlanFormatError, "in use computes"),
        (("specs", 0, "fields", "head_size"), "8", PlanFormatError, r"fields\.head_size = '8': must be int"),
        (("specs", 0, "fields", "head_size"), DROP, PlanFormatError, "lacks head_size"),
        (("specs", 0, "fields", "head_size_v"), 8, PlanFormatError, "is not how FullAttentionSpec writes it"),
        (("specs", 0, "fields", "dtype"), "torch.bfloat16", PlanFormatError, "is not how"),
        (("specs", 0, "fields", "kv_quant_mode"), 99, PlanFormatError, "must be KVQuantMode"),
        (("specs", 0, "fields", "kv_quant_mode"), False, PlanFormatError, "must be KVQuantMode"),
        (("specs", 0, "fields", "tokens_per_state"), "2/8", PlanFormatError, "tokens_per_state"),
        (("specs", 0, "fields", "tokens_per_state"), "1/0", PlanFormatError, "tokens_per_state"),
        (("specs", 0, "fields", "block_stride_alignment"), {"Multiple": {}}, PlanFormatError, "alignment"),
        (
            ("specs", 0, "fields", "block_stride_alignment"),
            {"MultipleOf": {}},
            PlanFormatError,
            "lacks tokens",
        ),
        (("specs", 0, "fields"), [], PlanFormatError, "must be an object"),
        (("specs", 0, "geometry", "page_bytes"), 1, PlanFormatError, "in use computes"),
        (("groups", 0, "spec"), 7, PlanFormatError, r"\$\.groups\[0\]\.spec = 7: .*one of 3 specs"),
        (("groups", 0, "spec"), True, PlanFormatError, "one of 3 specs"),
        (("groups", 0, "spec"), {}, PlanFormatError, "lacks uniform_type"),
        (("groups", 0, "spec", "uniform_type"), [], SpecError, "at least one layer"),
        (
            ("groups", 0, "layers", 0),
            ["a"],
            PlanFormatError,
            r"layers\[0\] = \['a'\]: must be a layer's name",
        ),
        (("groups", 0, "layers", "+"), ["a", 0], PlanFormatError, "given once"),
        (("groups", 0, "layers", "+"), ["x", 0], PlanError, "a page of every layer"),
        (("groups", 0, "layers"), DROP, PlanFormatError, "lacks layers"),
        (("groups", 0, "mood"), "good", PlanFormatError, "unknown keys mood"),
        (("groups", 0, "blocks_per_slab"), 3, PlanError, "split into the blocks"),
        (("groups", 0, "is_eagle_group"), 0, PlanFormatError, "is_eagle_group = 0: must be bool"),
        (("groups", 0, "pool"), "disk", PlanError, "no pool 'disk'"),
        (("groups", 0), 1, PlanFormatError, "must be an object"),
        (("tensors", 0, "offset"), 8, PlanError, "overlap"),
        (("tensors", 0, "offset"), -8, PlanError, "lie in its pool"),
        (("tensors", 0, "layers"), "a", PlanFormatError, "must be tuple"),
        (("tensors", 0), DROP, PlanError, "hold the same layers"),
    ],
)
def test_a_plan_that_was_tampered_with_is_refused(path, value, error, says):
    text = changed(json.loads(to_json(mixed())), path, value)
    with pytest.raises(error, match=says):
        from_json(text)
