"""Many layers' specs to one: the policies of fields, refusals as values, and the laws (contract 8)."""

import itertools
from dataclasses import dataclass

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe import ANY, EQUAL, FIRST_SET, MAX, FullAttentionSpec, Refusal, SpecBase, kv_field, merge_specs
from kvframe.checks import optional_at_least
from kvframe.errors import MergeError, SpecError
from kvframe.merge import merge_fields, refuse


@attrs.frozen(kw_only=True, repr=False)
class Spec(SpecBase):
    """One field of each policy, and one that says nothing."""

    equal: int = kv_field(default=0)
    any_of: bool = kv_field(merge=ANY, default=False)
    most: int | None = kv_field(merge=MAX, default=None)
    one: int | None = kv_field(merge=FIRST_SET, default=None, validator=optional_at_least(0))
    other: int | None = kv_field(merge=FIRST_SET, default=None)
    plain: str = attrs.field(default="x")
    derived: int = attrs.field(init=False, default=7)

    def __attrs_post_init__(self):
        if self.one is not None and self.other is not None:
            raise SpecError(spec="Spec", field="other", value=self.other, rule="one or the other, not both")


def layers(*changes, cls=Spec):
    return {f"layer.{index}": cls(16, **fields) for index, fields in enumerate(changes)}


def merged(*changes):
    return merge_fields(layers(*changes))


def test_the_policies_are_four():
    assert {policy.name for policy in (EQUAL, ANY, MAX, FIRST_SET)} == {"EQUAL", "ANY", "MAX", "FIRST_SET"}


@pytest.mark.parametrize(
    ("given", "result"),
    [
        ([{}], {}),
        ([{"equal": 3}, {"equal": 3}], {"equal": 3}),
        ([{"any_of": True}, {}], {"any_of": True}),
        ([{}, {"any_of": True}, {}], {"any_of": True}),
        ([{}, {}], {"any_of": False}),
        ([{"most": 3}, {"most": 9}, {"most": 4}], {"most": 9}),
        ([{}, {"most": -2}], {"most": -2}),
        ([{"one": 5}, {}, {"one": 5}], {"one": 5}),
        ([{}, {"one": 0}], {"one": 0}),
        ([{}, {"other": 1}], {"other": 1}),
    ],
)
def test_a_field_merges_by_its_policy(given, result):
    assert merged(*given) == Spec(16, **result)


@pytest.mark.parametrize(
    ("given", "field", "rule", "holders"),
    [
        (
            [{"equal": 3}, {"equal": 4}, {"equal": 3}],
            "equal",
            "all layers must hold the same value",
            {"3": ("layer.0", "layer.2"), "4": ("layer.1",)},
        ),
        (
            [{"plain": "b"}, {"plain": "a"}],
            "plain",
            "all layers must hold the same value",
            {"a": ("layer.1",), "b": ("layer.0",)},
        ),
        (
            [{"one": 512}, {}, {"one": 1024}],
            "one",
            "the one value that is set; unset layers do not conflict",
            {"1024": ("layer.2",), "512": ("layer.0",), "None": ("layer.1",)},
        ),
    ],
)
def test_a_conflict_names_the_field_and_who_holds_which_value(given, field, rule, holders):
    refusal = merged(*given)
    assert refusal == Refusal(field=field, rule=rule, layers=holders)
    assert [*refusal.layers] == sorted(refusal.layers)


def test_fields_that_break_a_rule_together_are_refused():
    refusal = merged({"one": 1}, {"other": 2})
    assert isinstance(refusal, Refusal)
    assert (refusal.field, refusal.rule) == ("other", "one or the other, not both")
    assert refusal.layers == {"Spec(16, one=1)": ("layer.0",), "Spec(16, other=2)": ("layer.1",)}


def test_kinds_never_merge_in_any_order():
    @attrs.frozen(kw_only=True, repr=False)
    class Derived(Spec):
        pass

    mixed = {"a": Spec(16), "b": Derived(16)}
    for order in (mixed, dict(reversed(mixed.items()))):
        refusal = merge_fields(order)
        assert isinstance(refusal, Refusal)
        assert refusal.field == "family"
        assert refusal.layers == {"Derived": ("b",), "Spec": ("a",)}


def test_a_layer_of_a_draft_makes_the_group_one():
    assert merge_fields({"a": Spec(16, is_draft=True), "b": Spec(16)}).is_draft


@pytest.mark.parametrize(
    ("given", "result"),
    [
        ([{"sliding_window": 512}, {}], {"sliding_window": 512}),
        ([{"attention_chunk_size": 512}, {}], {"attention_chunk_size": 512}),
        ([{"non_causal": True}, {}], {"non_causal": True}),
    ],
)
def test_full_attention_merges_as_the_contract_says(given, result):
    fields = {"num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
    specs = {str(index): FullAttentionSpec(16, **fields, **more) for index, more in enumerate(given)}
    assert merge_fields(specs) == FullAttentionSpec(16, **fields, **result)


@pytest.mark.parametrize(
    ("one", "two", "field"),
    [
        (
            {"sliding_window": 512},
            {"sliding_window": 1024},
            "sliding_window",
        ),  # Q5: refused, planning goes on
        ({"sliding_window": 512}, {"attention_chunk_size": 512}, "attention_chunk_size"),
        ({"dcp_sharded": False}, {}, "dcp_sharded"),
        ({"block_stride_alignment": 512}, {}, "block_stride_alignment"),
        ({"max_tp_shards": 1}, {}, "max_tp_shards"),
        ({"num_kv_heads": 4}, {}, "num_kv_heads"),
        ({"head_size": 64}, {}, "head_size"),
        ({"head_size_v": 64}, {}, "head_size_v"),
        ({"dtype": "float16"}, {}, "dtype"),
        ({"kv_quant_mode": 1}, {}, "kv_quant_mode"),
        ({"page_size_padded": 1 << 20}, {}, "page_size_padded"),
        ({"num_head_slots": 2}, {}, "num_head_slots"),
        ({"state_content_bytes": 8}, {}, "state_content_bytes"),
        ({"tokens_per_state": 4}, {}, "tokens_per_state"),
        ({"block_size": 32}, {}, "block_size"),
    ],
)
def test_full_attention_refuses_what_the_contract_refuses(one, two, field):
    def spec(changes):
        return FullAttentionSpec(
            **{"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16", **changes}
        )

    specs = {"a": spec(one), "b": spec(two)}
    for order in (specs, dict(reversed(specs.items()))):
        refusal = merge_fields(order)
        assert isinstance(refusal, Refusal)
        assert refusal.field == field


# --- specs that are not attrs classes --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Foreign:
    block_size: int = 16


def test_any_frozen_object_merges_with_its_equals_alone():
    assert merge_fields({"a": Foreign(), "b": Foreign()}) == Foreign()
    refusal = merge_fields({"a": Foreign(), "b": Foreign(32)})
    assert isinstance(refusal, Refusal)
    assert refusal.field == "spec"
    assert sorted(refusal.layers.values()) == [("a",), ("b",)]


# --- a merge that must succeed ---------------------------------------------------------------------------------------


def test_a_merge_that_must_succeed_raises_its_refusal():
    full = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    wide = attrs.evolve(full, head_size=256)
    with pytest.raises(MergeError) as caught:
        merge_specs({"layer.0": full, "layer.1": wide})
    error = caught.value
    assert (error.field, error.layers) == ("head_size", {"128": ("layer.0",), "256": ("layer.1",)})
    assert error.kind == "spec_conflict"
    assert str(error) == (
        "layers cannot share one spec: all layers must hold the same value. "
        "head_size: 128 in layer.0; 256 in layer.1."
    )
    assert merge_specs({"layer.0": full, "layer.1": full}) == full


def numbered(specs):
    return {f"layer {index}": spec for index, spec in enumerate(specs)}


def test_a_refusal_groups_layers_by_value_in_any_order():
    values = {"b": 2, "a": 2, "c": "two"}
    assert refuse("f", "rule", values) == refuse("f", "rule", dict(reversed(values.items())))
    assert refuse("f", "rule", values).layers == {"2": ("a", "b"), "two": ("c",)}


# --- laws ------------------------------------------------------------------------------------------------------------

fields = st.fixed_dictionaries(
    {},
    optional={
        "equal": st.integers(0, 1),
        "any_of": st.booleans(),
        "most": st.one_of(st.none(), st.integers(-2, 2)),
        "is_draft": st.booleans(),
        "plain": st.sampled_from("xy"),
    },
)
exclusive = st.one_of(
    st.just({}),
    st.builds(lambda value: {"one": value}, st.integers(0, 1)),
    st.builds(lambda value: {"other": value}, st.integers(0, 1)),
)
specs = st.builds(lambda a, b: Spec(16, **a, **b), fields, exclusive)


def every(spec):
    """All fields, those that equality leaves out too."""
    return attrs.astuple(spec)


@given(specs, st.integers(1, 4))
def test_merging_copies_gives_the_spec(spec, copies):
    assert every(merge_fields(numbered([spec] * copies))) == every(spec)


@given(st.lists(specs, min_size=1, max_size=4))
def test_the_order_of_layers_does_not_matter(drawn):
    named = numbered(drawn)
    results = [merge_fields(dict(order)) for order in itertools.permutations(named.items())]
    if isinstance(results[0], Refusal):
        assert all(result == results[0] for result in results)
    else:
        assert len({every(result) for result in results}) == 1


@given(specs, specs, specs)
def test_merging_in_steps_gives_the_same(a, b, c):
    whole = merge_fields(numbered([a, b, c]))
    pair = merge_fields(numbered([a, b]))
    if isinstance(pair, Refusal):
        assert isinstance(whole, Refusal)
        return
    steps = merge_fields(numbered([pair, c]))
    if isinstance(whole, Refusal):
        assert isinstance(steps, Refusal)
    else:
        assert every(steps) == every(whole)


@given(st.lists(specs, min_size=1, max_size=4))
def test_a_merged_spec_keeps_what_any_layer_set(drawn):
    result = merge_fields(numbered(drawn))
    if isinstance(result, Refusal):
        assert {name for names in result.layers.values() for name in names} == set(numbered(drawn))
        return
    assert result.any_of == any(spec.any_of for spec in drawn)
    assert result.is_draft == any(spec.is_draft for spec in drawn)
    given_values = [spec.most for spec in drawn if spec.most is not None]
    assert result.most == (max(given_values) if given_values else None)
    assert {spec.one for spec in drawn} <= {None, result.one}
    assert {spec.other for spec in drawn} <= {None, result.other}
