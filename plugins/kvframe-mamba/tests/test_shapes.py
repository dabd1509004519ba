"""State shapes by kind of layer, with the arithmetic beside them."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvframe.dtypes import CacheDTypes, builtin_cache_dtypes
from kvframe.errors import NotDivisibleError
from kvframe_mamba import MambaSpec, shapes
from kvframe_mamba.shapes import StateStorage

STORAGE = StateStorage(conv_dtype="bfloat16", recurrent_dtype="float32")


def split(tp, speculative_tokens=0):
    return StateStorage(
        conv_dtype="bfloat16", recurrent_dtype="float32", tp=tp, speculative_tokens=speculative_tokens
    )


def page(states):
    return MambaSpec(16, shapes=states[0], dtypes=states[1]).page_size_bytes


def test_mamba1_never_gets_speculative_columns():
    states = shapes.mamba1(split(2, speculative_tokens=3), inner=5120, state=16, kernel=4)
    assert states == (((3, 2560), (2560, 16)), ("bfloat16", "float32"))


def test_mamba2_convolves_heads_b_and_c():
    sizes = {"heads": 48, "head_dim": 64, "groups": 1, "state": 128, "kernel": 4}
    # 48*64 + 2*1*128 = 3,328 wide
    assert shapes.mamba2(STORAGE, **sizes)[0] == ((3, 3328), (48, 64, 128))
    # over 8 ranks each needs B and C of its own: 6*64 + 2*128 = 640; two draft tokens add two columns
    assert shapes.mamba2(split(8, 2), **sizes)[0] == ((5, 640), (6, 64, 128))
    # 3*3,328*2 + 48*64*128*2 = 19,968 + 786,432 bytes
    bf16 = StateStorage(conv_dtype="bfloat16", recurrent_dtype="bfloat16")
    assert page(shapes.mamba2(bf16, **sizes)) == 806_400


def test_mamba2_divides_groups_or_copies_them():
    sizes = {"heads": 24, "head_dim": 64, "groups": 4, "state": 16, "kernel": 4}
    assert shapes.mamba2(split(2), **sizes)[0][0] == (3, 12 * 64 + 2 * 2 * 16)
    assert shapes.mamba2(split(8), **sizes)[0][0] == (3, 3 * 64 + 2 * 1 * 16)
    assert shapes.mamba2(split(3), **sizes)[0][0] == (
        3,
        8 * 64 + 2 * 1 * 16,
    )  # 4 groups over 3 ranks: one each


def test_gated_delta_net_convolves_queries_keys_and_values():
    sizes = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 64, "kernel": 4}
    # 2*16*128 + 32*64 = 6,144 wide; the state is values by keys
    assert shapes.gated_delta_net(STORAGE, **sizes)[0] == ((3, 6144), (32, 64, 128))
    assert shapes.gated_delta_net(split(4, 1), **sizes)[0] == ((4, 1536), (8, 64, 128))


def test_kimi_delta_keeps_its_state_in_float32():
    storage = StateStorage(conv_dtype="bfloat16", recurrent_dtype="bfloat16")
    # 3*32*128 = 12,288 wide
    assert shapes.kimi_delta(storage, heads=32, head_dim=128, kernel=4) == (
        ((3, 12_288), (32, 128, 128)),
        ("bfloat16", "float32"),
    )


def test_kinds_with_one_state_use_the_dtype_of_the_cache():
    assert shapes.short_conv(split(2, 2), inner=2048, kernel=3) == (((4, 1024),), ("bfloat16",))
    assert shapes.lightning(split(8), heads=64, head_dim=128) == (((8, 128, 128),), ("bfloat16",))


@pytest.mark.parametrize(
    ("states", "field", "value"),
    [
        (lambda s: shapes.mamba1(s, inner=5120, state=16, kernel=4), "inner", 5120),
        (lambda s: shapes.mamba2(s, heads=80, head_dim=64, groups=1, state=128, kernel=4), "heads", 80),
        (
            lambda s: shapes.gated_delta_net(
                s, key_heads=16, value_heads=48, key_dim=128, value_dim=128, kernel=4
            ),
            "channels",
            2 * 16 * 128 + 48 * 128,
        ),
        (
            lambda s: shapes.gated_delta_net(
                s, key_heads=6, value_heads=32, key_dim=128, value_dim=128, kernel=4
            ),
            "value_heads",
            32,
        ),
        (lambda s: shapes.kimi_delta(s, heads=32, head_dim=128, kernel=4), "heads", 32),
        (lambda s: shapes.short_conv(s, inner=2048, kernel=3), "inner", 2048),
        (lambda s: shapes.lightning(s, heads=64, head_dim=128), "heads", 64),
    ],
)
def test_what_three_ranks_do_not_divide_is_refused_with_both_numbers(states, field, value):
    with pytest.raises(NotDivisibleError) as caught:
        states(split(3))
    assert (caught.value.field, caught.value.value, caught.value.divisor) == (field, value, 3)


@given(heads=st.integers(1, 64), head_dim=st.integers(1, 128), tp=st.sampled_from([1, 2, 3, 4, 8]))
def test_the_ranks_together_hold_the_whole_state(heads, head_dim, tp):
    assume(heads % tp == 0)
    whole = page(shapes.kimi_delta(STORAGE, heads=heads, head_dim=head_dim, kernel=4))
    assert page(shapes.kimi_delta(split(tp), heads=heads, head_dim=head_dim, kernel=4)) * tp == whole


@pytest.mark.parametrize(
    ("cache_dtype", "state_dtype", "dtypes"),
    [
        ("auto", None, ("bfloat16", "bfloat16")),
        ("auto", "float32", ("bfloat16", "float32")),
        ("float32", None, ("float32", "float32")),
        ("fp8", None, ("bfloat16", "bfloat16")),  # a quantised cache leaves states as the model has them
        ("int4_per_token_head", "float32", ("bfloat16", "float32")),
    ],
)
def test_the_options_decide_the_dtypes(cache_dtype, state_dtype, dtypes):
    cache = CacheDTypes(builtin_cache_dtypes()).get(cache_dtype)
    storage = StateStorage.resolve(cache, "bfloat16", state_dtype, tp=2, speculative_tokens=1, file="x.json")
    assert (storage.conv_dtype, storage.recurrent_dtype) == dtypes
    assert (storage.tp, storage.speculative_tokens, storage.file) == (2, 1, "x.json")
