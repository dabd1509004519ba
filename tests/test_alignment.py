"""Pages of hybrids: token blocks grow until a state fits, states are padded to the page (contract 5.9)."""

from fractions import Fraction

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe import (
    FullAttentionSpec,
    Lifetime,
    Paging,
    PluginHost,
    SpecBase,
    SpecFamily,
    hookimpl,
    kv_field,
    load_plugins,
)
from kvframe.errors import UsageError
from kvframe.planning.alignment import align_state_pages, aligned_block

MAX_MODEL_LEN = 16_384


@attrs.frozen(kw_only=True, repr=False)
class NoteSpec(SpecBase):
    """A kind that this test brings: so many bytes a block, whatever the block."""

    content: int = kv_field()
    cached: bool = kv_field(default=False)
    export: int | None = kv_field(default=None)
    page_size_padded: int | None = kv_field(default=None)

    @property
    def unpadded_page_size_bytes(self) -> int:
        return self.content

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.content


@attrs.frozen(kw_only=True, repr=False)
class OwnNoteSpec(NoteSpec):
    """The same, each layer a group of its own."""


@attrs.frozen(kw_only=True, repr=False)
class RawNoteSpec(NoteSpec):
    """The same, as raw pages that take no padding."""


@attrs.frozen(kw_only=True, repr=False)
class RingSpec(FullAttentionSpec):
    """One block for life; a larger block is a larger page."""


@attrs.frozen(kw_only=True, repr=False)
class WideKernelSpec(FullAttentionSpec):
    """Full attention whose kernels index no block below 128 tokens."""


@attrs.frozen(kw_only=True)
class NoteLifetime(Lifetime):
    state: bool = True

    def dead(self, n, prompt):
        return np.zeros_like(n), np.maximum(0, n - 1) // self.block


def note_lifetime(spec: NoteSpec) -> Lifetime:
    if spec.cached:
        return NoteLifetime(block=spec.block_size, export=spec.export)
    return Lifetime(block=spec.block_size, fixed=1, hits="never")


def family(spec_type, lifetime, **paging):
    return SpecFamily(
        name=spec_type.__name__, spec_type=spec_type, lifetime=lifetime, paging=Paging(**paging)
    )


class NotePlugin:
    @hookimpl
    def kvframe_spec_families(self):
        return [
            family(NoteSpec, note_lifetime, scales=False),
            family(OwnNoteSpec, note_lifetime, scales=False, own_group=True),
            family(RawNoteSpec, note_lifetime, scales=False, pads=False),
            family(RingSpec, lambda spec: Lifetime(block=spec.block_size, fixed=1, hits="free")),
            family(WideKernelSpec, lambda spec: Lifetime(block=spec.block_size), kernel_block=128),
        ]


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return load_plugins(extra=[NotePlugin()])


def attention(block_size=16, cls=FullAttentionSpec, heads=4):
    """2 * heads * 128 * 2 bytes a token: 2,048 for 4 heads."""
    return cls(block_size, num_kv_heads=heads, head_size=128, dtype="bfloat16")


def align(specs, host, **options):
    return align_state_pages(
        specs, host=host, **{"block_size": 16, "max_model_len": MAX_MODEL_LEN, **options}
    )


STATE = 806_400  # of Granite 4.0 H 1B: (4-1)*3328*2 + 48*64*128*2


def test_the_block_grows_in_steps_to_the_first_that_holds_the_state(host):
    # Case o11: ceil(806,400 / 32,768) = 25 steps of 16 tokens; 400 * 2,048 = 819,200
    assert aligned_block(STATE, 2048, block_size=16, kernel_block=16) == 400
    aligned = align({"attn": attention(), "mixer": NoteSpec(16, content=STATE)}, host)
    assert aligned["attn"].block_size == 400
    assert aligned["attn"].page_size_bytes == aligned["mixer"].page_size_bytes == 819_200
    assert aligned["mixer"].unpadded_page_size_bytes == 819_200 - 12_800
    assert aligned["mixer"].block_size == MAX_MODEL_LEN


def test_a_cached_state_is_kept_at_every_end_of_the_block(host):
    aligned = align({"attn": attention(), "mixer": NoteSpec(16, content=STATE, cached=True)}, host)
    assert aligned["attn"].block_size == aligned["mixer"].block_size == 400


def test_a_block_ends_where_a_kernel_can_save_a_state(host):
    # lcm(16, 64) = 64: ceil(806,400 / 131,072) = 7 steps
    saving = NoteSpec(16, content=STATE, cached=True, export=64)
    assert align({"attn": attention(), "mixer": saving}, host)["mixer"].block_size == 448
    assert (
        aligned_block(STATE, 2048, block_size=16, kernel_block=16, exports=[64, 48]) == 576
    )  # lcm 192, 3 steps


def test_the_largest_token_decides(host):
    specs = {"full": attention(), "few": attention(heads=1), "mixer": NoteSpec(16, content=STATE)}
    aligned = align(specs, host)
    assert {spec.block_size for layer, spec in aligned.items() if layer != "mixer"} == {400}
    assert aligned["mixer"].page_size_bytes == aligned["full"].page_size_bytes == 819_200


def test_the_largest_state_decides(host):
    aligned = align(
        {"attn": attention(), "a": NoteSpec(16, content=STATE), "b": NoteSpec(16, content=1)}, host
    )
    assert aligned["a"].page_size_bytes == aligned["b"].page_size_bytes == 819_200


def test_kernels_and_the_block_asked_for_are_lower_bounds(host):
    small = {"attn": attention(), "mixer": NoteSpec(16, content=10)}
    assert align(small, host)["attn"].block_size == 16
    assert align(small, host, block_size=256)["attn"].block_size == 256
    assert align(small, host, kernel_block_sizes=[64, 32])["attn"].block_size == 32
    wide = {"attn": attention(cls=WideKernelSpec), "mixer": NoteSpec(16, content=10)}
    assert align(wide, host)["attn"].block_size == 128


def test_a_state_as_large_as_the_page_is_not_padded(host):
    aligned = align({"attn": attention(), "mixer": NoteSpec(16, content=32 * 2048)}, host)
    assert aligned["attn"].block_size == 32
    assert aligned["mixer"].page_size_padded is None


def test_a_model_of_one_sort_stays_as_it_is(host):
    tokens = {"attn": attention(), "few": attention(heads=1)}
    assert align(tokens, host) == tokens
    cached = {"mixer": NoteSpec(16, content=STATE, cached=True)}
    assert align(cached, host) == cached
    uncached = align({"mixer": NoteSpec(16, content=STATE)}, host)
    assert uncached == {"mixer": NoteSpec(MAX_MODEL_LEN, content=STATE)}
    assert align({}, host) == {}


@pytest.mark.parametrize(
    "other",
    [
        attention(cls=RingSpec, heads=64),
        OwnNoteSpec(16, content=10**9),
        RawNoteSpec(16, content=10**9),
    ],
)
def test_rings_own_groups_and_raw_pages_take_no_part(host, other):
    specs = {"attn": attention(), "other": other, "mixer": NoteSpec(16, content=STATE)}
    aligned = align(specs, host)
    assert aligned["other"] == other
    assert list(aligned) == list(specs)
    assert aligned["attn"].block_size == 400
    assert align({"attn": attention(), "other": other}, host) == {"attn": attention(), "other": other}


def test_no_kernel_block_is_an_error(host):
    with pytest.raises(UsageError) as caught:
        align({}, host, kernel_block_sizes=[])
    assert caught.value.option == "kernel_block_sizes"


@given(
    state=st.integers(1, 10**7),
    token=st.fractions(Fraction(1, 8), 10**5, max_denominator=128),
    block=st.integers(1, 512),
    kernel=st.integers(1, 512),
    exports=st.lists(st.sampled_from([16, 48, 64, 256])),
)
def test_the_block_is_the_smallest_that_fits(state, token, block, kernel, exports):
    aligned = aligned_block(state, token, block_size=block, kernel_block=kernel, exports=exports)
    step = np.lcm.reduce([max(block, kernel), *exports])
    assert aligned % step == 0
    assert aligned * token >= state
    assert aligned == step or (aligned - step) * token < state


@given(state=st.integers(1, 10**7), cached=st.booleans(), heads=st.integers(1, 16))
def test_aligning_twice_changes_nothing(host, state, cached, heads):
    specs = {"attn": attention(heads=heads), "mixer": NoteSpec(16, content=state, cached=cached)}
    once = align(specs, host)
    assert align(once, host, block_size=once["attn"].block_size) == once
    assert once["attn"].page_size_bytes == once["mixer"].page_size_bytes >= state
