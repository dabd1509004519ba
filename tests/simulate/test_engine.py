"""Runs of tiny streams, each counted by hand: one layer, blocks of 4 tokens, one second a token."""

import pytest

from kvframe.errors import InsufficientMemoryError
from kvframe.simulate import Arrival, Pace, run_case
from tests.simulate.models import changed, tiny


def arrival(prompt, output, at=0.0, **more):
    return Arrival(arrival=at, prompt=prompt, output=output, **more)


def test_one_request_alone():
    # 6 + 3 tokens, the last of which is never computed: 8 in 2 blocks. The prompt costs no time here, and brings the
    # first token; two more steps bring the others.
    result = run_case(tiny(arrival(6, 3), blocks=16))
    assert (result.finished, result.prompt_tokens, result.output_tokens) == (1, 6, 3)
    assert (result.peak_alive, result.refusals, result.preemptions) == (1, 0, 0)
    assert result.simulated_seconds == pytest.approx(2, abs=1e-6)
    assert result.alive_at_first_refusal is None


def test_the_pool_at_the_first_refusal():
    # 16 blocks. Prompts of 8, 20 and 30 tokens take 2, 5 and 8; the fourth needs 2 and 1 is left.
    # 58 of 17 * 4 = 68 places hold a token, the null block's among them.
    result = run_case(tiny(arrival(8, 1), arrival(20, 1), arrival(30, 1), arrival(5, 1), blocks=16))
    assert result.alive_at_first_refusal == 3
    assert result.useful_at_first_refusal == pytest.approx(58 / 68)
    assert (result.refusals, result.finished, result.preemptions) == (1, 4, 0)


def test_the_youngest_request_is_preempted_and_resumes():
    # 16 blocks. Both prompts of 28 take 7; each grows to 28 + 12 - 1 = 39 tokens: 10 blocks, 20 in all. At 32 tokens
    # both hold 8; at 33 the first takes no block, since none is left: the second goes, and comes back when the first
    # has ended. It had 32 tokens computed and 33 known; nothing was cached, so all 33 are computed again.
    result = run_case(tiny(arrival(28, 12), arrival(28, 12), blocks=16))
    assert (result.finished, result.preemptions) == (2, 1)
    assert result.recomputed_tokens == 33
    assert result.output_tokens == 24


def test_a_request_that_cannot_fit_alone_is_left_out():
    # 16 blocks of 4 hold 64 tokens, so 64 tokens fit; with a watermark of a half nothing of 40 tokens does while
    # something else runs, and alone the watermark does not count.
    result = run_case(tiny(arrival(33, 2), arrival(40, 2), blocks=16, watermark=0.5))
    assert (result.finished, result.unservable) == (2, 0)
    long = run_case(tiny(arrival(60, 9), arrival(4, 2), blocks=16))
    assert (long.finished, long.too_long) == (1, 1)


def test_requests_come_when_they_come():
    # The second arrives after 10 seconds, when the first (4 tokens decoded in 3 seconds) is long gone.
    result = run_case(tiny(arrival(4, 4), arrival(4, 4, at=10.0), blocks=16))
    assert result.peak_alive == 1
    assert result.simulated_seconds == pytest.approx(13, abs=1e-6)
    assert result.mean_alive == pytest.approx(6 / 13, abs=1e-6)


def test_shared_parts_are_found():
    # 16 of the second prompt's 20 tokens were cached by the first: 4 whole blocks.
    first, second = (arrival(20, 2, at=at, prefix=(("manual", 16),)) for at in (0.0, 9.0))
    result = run_case(tiny(first, second, blocks=16))
    assert result.caching
    assert (result.hit_tokens, result.prompt_tokens) == (16, 40)
    assert result.hit_rate == pytest.approx(0.4)
    assert [group.hit_rate for group in result.groups] == [pytest.approx(0.4)]


def test_an_output_that_comes_back_in_a_prompt_is_found():
    # The second turn repeats prompt and answer: 8 + 9 tokens, of which the last was never computed: 16 are cached.
    first = arrival(8, 9, prefix=(("p", 8),), output_id="answer")
    second = arrival(20, 2, at=30.0, prefix=(("p", 8), ("answer", 9)))
    result = run_case(tiny(first, second, blocks=16))
    assert result.hit_tokens == 16


def test_a_stream_that_shares_nothing_caches_nothing():
    result = run_case(tiny(arrival(20, 2), arrival(20, 2), blocks=16))
    assert not result.caching
    assert (result.hit_rate, result.evictions) == (0.0, 0)


def test_evictions_are_counted():
    # Two documents of 32 tokens in turns: 8 blocks each and 1 for the question; 16 blocks cannot keep both whole.
    stream = [arrival(36, 1, at=10.0 * i, prefix=((f"d{i % 2}", 32),)) for i in range(4)]
    result = run_case(tiny(*stream, blocks=16))
    assert result.evictions > 0
    assert result.evictions == sum(group.evicted_blocks for group in result.groups)


def test_a_coarser_look_changes_time_but_not_what_is_done():
    stream = [arrival(5 + i, 7 + i) for i in range(6)]
    fine = run_case(tiny(*stream, blocks=64))
    coarse = run_case(
        tiny(*stream, blocks=64, pace=Pace(quantum=16, token_seconds=1.0, prefill_rate=1e9, ramp=0.0))
    )
    assert (fine.finished, fine.output_tokens) == (coarse.finished, coarse.output_tokens)
    assert coarse.peak_alive == 6


def test_the_ramp_lets_the_pool_fill_under_churn():
    # All wait from the start. Without a ramp all 16 are admitted at once; with it one more a round.
    stream = [arrival(4, 2) for _ in range(16)]
    assert run_case(tiny(*stream, blocks=64)).peak_alive == 16
    ramp = Pace(quantum=1, token_seconds=1.0, prefill_rate=1e9, ramp=0.02)
    assert run_case(tiny(*stream, blocks=64, pace=ramp)).peak_alive < 16


def test_a_plan_that_does_not_fit_is_an_error():
    with pytest.raises(InsufficientMemoryError):
        run_case(tiny(arrival(4, 2), blocks=3))


def test_equal_cases_give_equal_results():
    case = tiny(*(arrival(9, 9, prefix=(("a", 8),)) for _ in range(9)), blocks=20)
    assert run_case(case) == run_case(case)
    assert run_case(changed(case, eviction="frequency")).finished == 9
