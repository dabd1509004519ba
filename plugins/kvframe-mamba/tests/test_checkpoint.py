"""Where a prefill can leave a state: contract 3.8 and 3.9, worked numbers [run]."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe.errors import SpecError
from kvframe_mamba import get_mamba_prefill_checkpoint_position as position
from kvframe_mamba import is_mamba_prefill_checkpoint_valid as valid


@pytest.mark.parametrize("lookahead", [None, 0, 1])
@pytest.mark.parametrize(
    ("tokens", "unit", "drop", "expected"),
    [
        (100, 16, False, 96),
        (96, 16, False, 80),
        (97, 16, False, 96),
        (97, 16, True, 80),
        (10, 16, False, 0),
        (20, 16, True, 0),
        (0, 16, False, 0),
        (0, 16, True, 0),
    ],
)
def test_both_forms_agree(tokens, unit, drop, expected, lookahead):
    assert position(tokens, unit, drop, lookahead) == expected


def test_the_forms_differ_where_the_unit_divides_the_prompt_and_a_unit_is_dropped():
    assert position(96, 16, True) == 64  # (96 - 1)//16*16 - 16
    assert position(96, 16, True, lookahead=1) == 80  # 96//16*16 - 16


def test_looking_ahead_leaves_more_to_compute():
    assert position(97, 16, False, lookahead=3) == 80  # (97 - 3)//16*16


@given(tokens=st.integers(0, 5000), unit=st.integers(1, 300), drop=st.booleans(), look=st.integers(0, 5))
def test_the_forms_follow_their_formulas(tokens, unit, drop, look):
    first = (tokens - 1) // unit * unit - (unit if drop else 0)
    assert position(tokens, unit, drop) == max(first, 0)
    limit = tokens if drop else tokens - max(1, look)
    assert position(tokens, unit, drop, look) == max(limit // unit * unit - (unit if drop else 0), 0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, 1000, 896, 64, 256, 64), True),
        ((0, 1000, 896, 64, 256, None), False),
        ((512, 1000, 960, 64, 256, 64), True),  # ceil(1000/256) - 2 = 2 > 511//256 = 1
        ((0, 500, 448, 64, 256, 64), True),  # ceil(500/256) - 2 = 0 > -1
        ((32, 1000, 896, 64, 256, 64), False),  # 32 is no multiple of 64
        ((0, 256, 192, 64, 256, 64), False),  # no free entry: ceil(256/256) - 2 = -1
        ((0, 1000, 0, 64, 256, 64), False),  # the step starts there
        ((0, 1000, 1000, 64, 256, 8), False),  # the step ends there
        ((64, 1000, 96, 64, 256, 32), False),  # less than a unit after the start
        ((0, 1000, 896, 64, 256, 128), True),  # 896 = 7*128
        ((0, 1000, 960, 64, 256, 128), False),
    ],
)
def test_a_kernel_saves_a_state_only_where_it_can(arguments, expected):
    assert valid(*arguments) is expected


@pytest.mark.parametrize("alignment", [0, -64])
def test_an_alignment_that_is_none_is_an_error(alignment):
    with pytest.raises(SpecError) as caught:
        valid(0, 1000, 896, 64, 256, alignment)
    assert (caught.value.field, caught.value.value) == ("checkpoint_alignment", alignment)


def test_a_hash_unit_below_one_is_an_error():
    with pytest.raises(SpecError, match="hash_block_size = 0"):
        position(96, 0, False)
    with pytest.raises(SpecError, match="mamba_block_size = 0"):
        valid(0, 1000, 896, 64, 0, 64)
