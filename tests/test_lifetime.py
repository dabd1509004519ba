"""The lifetime rule and what follows from it, against a plain walk over every token count (lifetime.md)."""

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe import Lifetime
from kvframe.errors import SpecError


@attrs.frozen(kw_only=True)
class Window(Lifetime):
    """Entries die once all their tokens are below the window."""

    window: int

    def dead(self, n, prompt):
        return np.zeros_like(n), np.maximum(0, n - self.window + 1 - self.slack) // self.block


@attrs.frozen(kw_only=True)
class SteadyWindow(Window):
    """The same, which says from where on its holdings repeat."""

    @property
    def steady_from(self):
        return self.window + self.slack + self.block


@attrs.frozen(kw_only=True)
class Chunks(Lifetime):
    """A whole chunk dies when the next begins."""

    chunk: int

    def dead(self, n, prompt):
        return np.zeros_like(n), n // self.chunk * self.chunk // self.block


@attrs.frozen(kw_only=True)
class Generated(Lifetime):
    """The prompt stays; of the generated tokens a window stays (R-SWA)."""

    window: int

    def dead(self, n, prompt):
        return np.zeros_like(n) - (-prompt // self.block), np.maximum(prompt, n - self.window) // self.block


@attrs.frozen(kw_only=True)
class States(Lifetime):
    """The state after one position; a step reads only the last."""

    state: bool = True

    def dead(self, n, prompt):
        return np.zeros_like(n), np.maximum(0, n - 1) // self.block


small = st.integers(1, 9)
plain = st.builds(Lifetime, block=small, spare=st.integers(0, 2))
windows = st.builds(
    lambda cls, **fields: cls(**fields),
    st.sampled_from([Window, SteadyWindow]),
    block=small,
    window=st.integers(1, 40),
    slack=st.integers(0, 5),
)
chunks = st.builds(Chunks, block=small, chunk=st.integers(1, 40))
generated = st.builds(Generated, block=small, window=st.integers(1, 40))
tokens = st.one_of(plain, windows, chunks, generated)


def walk(rule, in_flight, max_len, prompt):
    """The most entries alive over every settled count of a request, one at a time."""
    most = 0
    for n in range(max_len):
        lo, hi = rule.dead(n, prompt)
        held = -(-min(n + in_flight, max_len) // rule.block) + rule.spare
        most = max(most, held - max(0, int(hi) - int(lo)))
    return most


# --- the peak --------------------------------------------------------------------------------------------------------


@given(tokens, st.integers(1, 30), st.integers(1, 200))
def test_the_peak_is_what_a_walk_over_all_lengths_finds(rule, in_flight, max_len):
    worst = max(walk(rule, in_flight, max_len, prompt) for prompt in (1, max_len // 2, max_len))
    assert rule.peak(in_flight, max_len) == worst


@given(windows, st.integers(1, 30), st.integers(1, 400))
def test_where_holdings_repeat_the_rest_need_not_be_looked_at(rule, in_flight, max_len):
    said = SteadyWindow(block=rule.block, window=rule.window, slack=rule.slack)
    silent = Window(block=rule.block, window=rule.window, slack=rule.slack)
    assert silent.steady_from is None
    assert said.peak(in_flight, max_len) == silent.peak(in_flight, max_len)


@given(tokens, st.integers(1, 30), st.integers(1, 200))
def test_the_peak_is_never_more_than_all_entries_and_grows_with_its_limits(rule, in_flight, max_len):
    peak = rule.peak(in_flight, max_len)
    assert 1 <= peak <= -(-max_len // rule.block) + rule.spare
    assert rule.peak(in_flight + 1, max_len) >= peak
    assert rule.peak(in_flight, max_len + 1) >= peak


@pytest.mark.parametrize(
    ("rule", "in_flight", "max_len", "peak"),
    [
        (Lifetime(block=16), 1, 8192, 512),
        (Lifetime(block=16), 8192, 8193, 513),
        (Window(block=16, window=8), 1, 4096, 2),  # a window may straddle two blocks
        (Window(block=16, window=4096), 1, 32768, 257),  # ceil((4096 - 1) / 16) + 1
        (Window(block=16, window=262144), 1, 131072, 8192),  # never more than ceil(M / block)
        (Window(block=16, window=1024), 8192, 131072, 577),  # ceil((1024 - 1 + 8192) / 16) + 1
        (Window(block=16, window=1024), 8192, 4096, 256),  # capped (Q9)
        (
            Window(block=4, window=4, slack=2),
            4,
            4096,
            3,
        ),  # 4 - 1 + 2 + 4 = 9 tokens lie in 3 blocks of 4 at most
        (Chunks(block=16, chunk=8192), 1, 32768, 512),
        (Chunks(block=16, chunk=8192), 8192, 131072, 1024),
        (Chunks(block=16, chunk=24), 1, 4096, 2),
        # ceil((24 + 24) / 16) + 1: a chunk may start inside a block
        (Chunks(block=16, chunk=24), 24, 4096, 4),
        (Generated(block=16, window=128), 1, 4096, 256),  # a prompt of the whole length gives nothing back
        (SteadyWindow(block=16, window=1024), 1, 10_000_000, 65),
        (Window(block=16, window=1024), 1, 1, 1),
        (Lifetime(block=16, fixed=1), 8192, 131072, 1),
        (Lifetime(block=16, fixed=0), 1, 131072, 0),
        (Lifetime(block=16, fixed=3, spare=2), 1, 16, 3),
        (States(block=400), 1, 131072, 2),  # the state before and the running one (contract 5.9)
        (States(block=400), 1, 400, 1),
        (States(block=400), 1, 401, 2),
        (States(block=400, spare=2), 1, 131072, 4),
        (States(block=400, spare=2, export=64), 1, 131072, 5),
    ],
)
def test_known_peaks(rule, in_flight, max_len, peak):
    assert rule.peak(in_flight, max_len) == peak


@pytest.mark.parametrize(("positions", "blocks"), [(1500, 94), (0, 0), (16, 1)])
def test_an_encoders_entries_are_filled_once(positions, blocks):
    rule = Lifetime(block=16, source="encoder")
    assert rule.peak(8192, 131072, max_encoder_tokens=positions) == blocks  # ceil(1500 / 16)


def test_the_peak_of_a_long_context_needs_no_long_walk():
    rule = SteadyWindow(block=16, window=4096)
    assert rule.peak(1, 1 << 40) == 257


# --- entries and what is alive ---------------------------------------------------------------------------------------


def test_entries_follow_tokens_unless_their_number_is_fixed():
    assert [Lifetime(block=16).entries(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert Lifetime(block=16, spare=3).entries(17) == 5
    assert Lifetime(block=16, fixed=4).entries(1 << 30) == 4


@given(tokens, st.lists(st.integers(0, 300), min_size=1, max_size=5), st.integers(1, 300))
def test_a_batch_is_answered_as_its_requests_are(rule, settled, prompt):
    n = np.array(settled, dtype=np.int64)
    prompts = np.full_like(n, prompt)
    lo, hi = rule.dead(n, prompts)
    assert lo.shape == hi.shape == n.shape
    assert list(zip(lo.tolist(), hi.tolist(), strict=True)) == [
        tuple(int(end) for end in rule.dead(one, prompt)) for one in settled
    ]
    assert rule.entries(n).tolist() == [rule.entries(one) for one in settled]
    assert rule.alive(n, n + 3, prompts).tolist() == [
        int(rule.alive(one, one + 3, prompt)) for one in settled
    ]


def test_a_fixed_table_has_its_entries_for_every_request_of_a_batch():
    assert Lifetime(block=16, fixed=2).entries(np.array([0, 5, 99])).tolist() == [2, 2, 2]


@given(tokens, st.integers(0, 300), st.integers(1, 300))
def test_what_is_dead_stays_dead(rule, n, prompt):
    assert int(rule.dead(n + 1, prompt)[1]) >= int(rule.dead(n, prompt)[1])


@given(tokens, st.integers(2, 8), st.integers(1, 20), st.integers(1, 300))
def test_context_parallel_ranks_widen_the_block(rule, ranks, in_flight, max_len):
    wide = rule.scaled(ranks)
    assert wide.block == rule.block * ranks
    assert type(wide) is type(rule)
    assert wide == attrs.evolve(rule, block=rule.block * ranks)


def test_nothing_of_full_attention_dies():
    rule = Lifetime(block=16)
    assert [int(end) for end in rule.dead(1 << 30, 5)] == [0, 0]
    assert (rule.recycles, rule.thins) == (False, False)


@pytest.mark.parametrize(
    ("rule", "recycles", "thins", "per_token"),
    [
        (Window(block=16, window=4096), True, True, True),
        (Chunks(block=16, chunk=8192), True, True, True),
        (Generated(block=16, window=128), True, False, True),  # a prefix of prompt tokens lacks nothing
        (States(block=400), True, True, False),
        (Lifetime(block=16, fixed=1), False, False, False),
    ],
)
def test_what_kind_of_rule_it_is(rule, recycles, thins, per_token):
    assert (rule.recycles, rule.thins, rule.per_token) == (recycles, thins, per_token)


# --- the next death --------------------------------------------------------------------------------------------------


@given(tokens, st.integers(0, 120), st.integers(1, 120), st.integers(0, 200))
def test_the_next_death_is_the_first_that_a_walk_finds(rule, n, prompt, limit):
    now = int(rule.dead(n, prompt)[1])
    later = (at for at in range(n + 1, limit + 1) if int(rule.dead(at, prompt)[1]) > now)
    assert rule.next_death(n, prompt, limit) == next(later, None)


@pytest.mark.parametrize(
    ("rule", "n", "at"),
    [
        (Lifetime(block=16), 0, None),
        (Window(block=16, window=8), 0, 23),  # n - 8 + 1 = 16
        (Window(block=16, window=8), 23, 39),
        (Chunks(block=16, chunk=64), 5, 64),
        (States(block=400), 0, 401),
    ],
)
def test_known_deaths(rule, n, at):
    assert rule.next_death(n, 1, 100_000) == at


# --- values that are refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block", 0),
        ("source", "disk"),
        ("fixed", -1),
        ("spare", -1),
        ("export", 0),
        ("hits", "sometimes"),
        ("slack", -1),
    ],
)
def test_a_bad_value_is_refused(field, value):
    with pytest.raises(SpecError) as caught:
        Lifetime(**{"block": 16, field: value})
    assert (caught.value.spec, caught.value.field, caught.value.value) == ("Lifetime", field, value)


def test_equal_rules_are_equal_and_hashable():
    assert Window(block=16, window=8) == Window(block=16, window=8)
    assert Window(block=16, window=8) != SteadyWindow(block=16, window=8)
    assert len({Window(block=16, window=8), Window(block=16, window=8), Window(block=16, window=9)}) == 2
