"""What holds for the specs of every family: they are values. They hash, compare, pickle, and print short."""

from __future__ import annotations

import copy
import pickle

import attrs
import pytest

from kvframe import load_plugins
from tests.spec_examples import EVERY, EXAMPLES

SPECS = [
    pytest.param(name, spec, id=f"{name}-{index}")
    for name, specs in EVERY.items()
    for index, spec in enumerate(specs)
]


def test_every_installed_family_has_an_example():
    assert all(EVERY.values())
    assert EXAMPLES.keys() <= EVERY.keys()


@pytest.mark.parametrize(("name", "spec"), SPECS)
def test_a_spec_is_of_its_own_family(name, spec):
    family = load_plugins().family(spec)
    assert (family.name, family.spec_type) == (name, type(spec))


@pytest.mark.parametrize(("name", "spec"), SPECS)
def test_a_spec_is_a_value(name, spec):
    for other in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec)), attrs.evolve(spec)):
        assert other == spec
        assert hash(other) == hash(spec)
        assert other.is_draft == spec.is_draft
    wider = attrs.evolve(spec, block_size=spec.block_size * 2, **padded(spec))
    assert wider != spec
    assert len({spec, copy.deepcopy(spec), wider}) == 2
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        spec.block_size = 1


def padded(spec):
    """A block twice as long needs a page twice as long."""
    page = getattr(spec, "page_size_padded", None)
    return {"page_size_padded": 2 * page} if page else {}


@pytest.mark.parametrize(("name", "spec"), SPECS)
def test_a_draft_layer_s_spec_equals_the_target_s(name, spec):
    assert attrs.evolve(spec, is_draft=not spec.is_draft) == spec


@pytest.mark.parametrize(("name", "spec"), SPECS)
def test_a_spec_prints_what_differs_from_the_defaults(name, spec):
    text = repr(spec)
    assert text.startswith(f"{type(spec).__name__}({spec.block_size}, ")
    for field in attrs.fields(type(spec))[1:]:
        differs = getattr(spec, field.name) != field.default
        assert (f", {field.alias}=" in text) == differs
    assert "\n" not in text


def test_a_common_spec_fits_into_a_line():
    assert repr(EXAMPLES["full_attention"][0]) == (
        "FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype='bfloat16')"
    )
    # head_size_v is 0 in every latent spec, so it says nothing
    assert repr(EXAMPLES["mla"][0]) == "MLAAttentionSpec(64, num_kv_heads=1, head_size=576, dtype='bfloat16')"


@pytest.mark.parametrize("name", EVERY)
def test_specs_of_different_families_are_never_equal(name):
    for other, specs in EVERY.items():
        if other != name:
            assert all(spec != mine for spec in specs for mine in EVERY[name])
