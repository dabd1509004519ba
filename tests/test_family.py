"""SpecFamily: what a family has unless it says otherwise, and what makes two layers share a block table."""

import attrs
import pytest

from kvframe import (
    AttentionSpec,
    EngineConfig,
    FullAttentionSpec,
    Lifetime,
    Paging,
    Refusal,
    SpecBase,
    SpecFamily,
    Traits,
    kv_field,
    load_plugins,
)
from kvframe.errors import SpecError
from kvframe.family import full_attention_family, no_promotion
from kvframe.merge import merge_fields

FIELDS = {"num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}


@attrs.frozen(kw_only=True)
class Stride(Lifetime):
    """A lifetime with a number of its own."""

    stride: int = 2


@attrs.frozen(kw_only=True, repr=False)
class StridedSpec(AttentionSpec):
    """A spec of a plugin."""

    stride: int = kv_field(default=2)


def strided(**changes):
    return SpecFamily(
        **{
            "name": "strided",
            "spec_type": StridedSpec,
            "lifetime": lambda spec: Stride(block=spec.block_size, stride=spec.stride),
            **changes,
        }
    )


def test_a_name_a_type_and_a_lifetime_are_enough():
    family = strided()
    spec = StridedSpec(16, **FIELDS)
    assert family.merge is merge_fields
    assert family.group_key(spec) is None
    assert family.window(spec) is None
    assert (family.retain, family.make_views, family.replaces) == (None, None, None)
    assert (family.paging, family.traits) == (Paging(), Traits())
    refusal = family.promote(spec, 16)
    assert isinstance(refusal, Refusal)
    assert (refusal.field, refusal.layers) == ("family", {"StridedSpec": ("",)})
    assert no_promotion(spec) == refusal


def test_pages_scale_and_pad_unless_said():
    paging = Paging()
    assert (paging.scales, paging.pads, paging.own_group, paging.fallback) == (True, True, False, False)
    assert (paging.bucket, paging.kernel_block) == ("layers", 1)


def test_traits_promise_nothing_unless_said():
    traits = Traits()
    assert (traits.event_kind, traits.dcp) == ("unknown", "sharded")
    assert (traits.needs_zeroing, traits.transferable) == (False, True)


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [
        (Paging, "bucket", "columns"),
        (Paging, "kernel_block", 0),
        (Traits, "dcp", "maybe"),
    ],
)
def test_a_bad_value_is_refused(cls, field, value):
    with pytest.raises(SpecError) as caught:
        cls(**{field: value})
    assert (caught.value.spec, caught.value.field, caught.value.value) == (cls.__name__, field, value)


# --- which layers may share a block table ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ({}, {}, True),
        ({}, {"num_kv_heads": 4}, True),  # the page differs, the number of blocks does not
        ({}, {"head_size": 64, "dtype": "uint8"}, True),
        ({}, {"page_size_padded": 1 << 20}, True),
        ({}, {"block_size": 32}, False),
        ({}, {"stride": 3}, False),
        ({}, {"dcp_sharded": False}, False),
    ],
)
def test_layers_that_need_the_same_blocks_share_a_table(one, other, shared):
    family = strided()
    made = [StridedSpec(**{"block_size": 16, **FIELDS, **changes}) for changes in (one, other)]
    assert (family.table_key(made[0]) == family.table_key(made[1])) is shared


def test_a_key_of_the_familys_own_keeps_layers_apart():
    family = strided(group_key=lambda spec: spec.num_kv_heads)
    one, other = StridedSpec(16, **FIELDS), StridedSpec(16, **{**FIELDS, "num_kv_heads": 4})
    assert family.table_key(one) != family.table_key(other)


@pytest.mark.parametrize(("sharded", "dcp", "block"), [(True, 1, 16), (True, 4, 64), (False, 4, 16)])
def test_a_block_is_as_wide_as_its_ranks_make_it(sharded, dcp, block):
    engine = EngineConfig(max_model_len=4096, dcp=dcp)
    rule = strided().engine_lifetime(StridedSpec(16, dcp_sharded=sharded, **FIELDS), engine)
    assert rule == Stride(block=block, stride=2)


def test_raw_pages_are_not_spread_over_ranks():
    family = strided(spec_type=SpecBase, lifetime=lambda spec: Lifetime(block=spec.block_size))
    engine = EngineConfig(max_model_len=4096, dcp=4)
    assert family.engine_lifetime(SpecBase(16), engine).block == 16


# --- the one family of the core --------------------------------------------------------------------------------------


def test_full_attention_keeps_everything_and_stands_for_itself():
    family = full_attention_family()
    spec = FullAttentionSpec(16, **FIELDS)
    assert (family.name, family.spec_type) == ("full_attention", FullAttentionSpec)
    assert family.lifetime(spec) == Lifetime(block=16)
    assert family.promote(spec, 32) is spec
    assert (family.traits.event_kind, family.window(spec)) == ("full_attention", None)
    assert load_plugins().family(spec).name == "full_attention"


# --- every installed family ------------------------------------------------------------------------------------------

FAMILIES = load_plugins().families


@pytest.mark.parametrize("name", FAMILIES)
def test_an_installed_family_has_a_class_of_its_own_with_the_specs_form(name):
    family = FAMILIES[name]
    assert family.name == name
    assert attrs.has(family.spec_type)
    assert issubclass(family.spec_type, SpecBase)
    assert family.spec_type.__hash__ is not None
    assert family.spec_type.__doc__
    assert family.spec_type.__setattr__ is not object.__setattr__  # frozen
    assert family.traits.event_kind


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_an_installed_spec_says_how_it_merges(name):
    silent = [
        field.name
        for field in attrs.fields(FAMILIES[name].spec_type)
        if "kvframe.merge" not in field.metadata
    ]
    assert silent == []


def test_families_have_types_and_names_of_their_own():
    types = [family.spec_type for family in FAMILIES.values()]
    assert len(set(types)) == len(types)
