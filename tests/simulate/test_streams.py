"""Streams: distributions, seeds, the two forms of recorded files, and what is refused in them."""

import json

import numpy as np
import pytest

from kvframe.simulate import (
    Arrival,
    RandomStream,
    RecordedStream,
    StreamError,
    mooncake_lines,
    parse_lengths,
    read_stream,
)
from kvframe.simulate.streams import Tokens


def drawn(text, count=2000):
    return parse_lengths(text).draw(np.random.default_rng(1), count)


def written(tmp_path, *lines):
    path = tmp_path / "stream.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


# --- lengths ---


def test_a_number_is_always_drawn():
    assert set(drawn("512").tolist()) == {512}


def test_a_range_is_uniform_with_both_ends():
    found = drawn("16-19").tolist()
    assert {found.count(n) > 400 for n in (16, 17, 18, 19)} == {True}  # 500 each, give or take


def test_a_lognormal_has_its_median_and_stays_below_its_end():
    found = drawn("lognormal:400,0.5,1000")
    assert 370 < np.median(found) < 430
    assert found.max() == 1000
    assert found.min() >= 1


@pytest.mark.parametrize("text", ["", "0", "9-3", "16..32", "lognormal:0,1", "lognormal:50,1,20", "x"])
def test_other_texts_are_refused(text):
    with pytest.raises(StreamError, match="must be of the form"):
        parse_lengths(text)


# --- random streams ---


def random_stream(**changed):
    values = {"requests": 200, "prompt": parse_lengths("8-16"), "output": parse_lengths("4")}
    return RandomStream(**{**values, **changed})


def test_a_seed_gives_the_same_requests_and_another_others():
    assert random_stream(seed=3).arrivals() == random_stream(seed=3).arrivals()
    assert random_stream(seed=3).arrivals() != random_stream(seed=4).arrivals()


def test_documents_come_first_and_have_a_length_each():
    found = random_stream(documents=3, document=parse_lengths("100-200")).arrivals()
    lengths = {}
    for arrival in found:
        ((name, tokens),) = arrival.prefix
        assert lengths.setdefault(name, tokens) == tokens
        assert 8 <= arrival.prompt - tokens <= 16
    assert len(lengths) == 3


def test_skew_makes_the_first_document_the_most_popular():
    found = random_stream(requests=3000, documents=4, document=parse_lengths("9"), skew=1.0).arrivals()
    names = [arrival.prefix[0][0] for arrival in found]
    # Weights 1, 1/2, 1/3, 1/4: the first has 12 / 25 of all.
    assert names.count("document 0") / 3000 == pytest.approx(12 / 25, abs=0.03)


def test_a_rate_spreads_arrivals():
    times = [arrival.arrival for arrival in random_stream(requests=2000, rate=4.0).arrivals()]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(500, rel=0.1)
    assert {arrival.arrival for arrival in random_stream().arrivals()} == {0.0}


@pytest.mark.parametrize("changed", [{"documents": 2}, {"document": parse_lengths("9")}, {"rate": 0.0}])
def test_contradictions_are_refused(changed):
    with pytest.raises(StreamError):
        random_stream(**changed)


# --- token ids ---


def test_equal_parts_are_equal_tokens_and_nothing_else_is():
    tokens = Tokens()
    a, b = (tokens.of(Arrival(prompt=8, output=2, prefix=(("x", 5),))) for _ in range(2))
    assert (a[0][:5] == b[0][:5]).all()
    assert not set(a[0][5:].tolist()) & set(b[0][5:].tolist())
    assert a[0].dtype == np.int32
    assert (a[0] >= 0).all()
    assert len(a[1]) == 2


# --- recorded streams ---


def test_kvframes_own_form(tmp_path):
    path = written(
        tmp_path,
        {"arrival": 2.5, "prompt": 20, "output": 3, "prefix": [["manual", 12], [7, 4]], "output_id": "a"},
        "",
        {"prompt": 4, "output": 1},
    )
    assert read_stream(path) == RecordedStream(
        requests=(
            Arrival(arrival=2.5, prompt=20, output=3, prefix=(("manual", 12), ("7", 4)), output_id="a"),
            Arrival(prompt=4, output=1),
        )
    )
    assert [arrival.prompt for arrival in read_stream(path).arrivals()] == [4, 20]
    assert len(read_stream(path, limit=1).requests) == 1


def test_the_mooncake_form(tmp_path):
    # 1,200 tokens are two ids of 512 and one of 176.
    path = written(
        tmp_path, {"timestamp": 1500, "input_length": 1200, "output_length": 9, "hash_ids": [5, 6, 40]}
    )
    (arrival,) = read_stream(path).requests
    assert arrival == Arrival(arrival=1.5, prompt=1200, output=9, prefix=((5, 512), (6, 512), (40, 176)))


def test_mooncake_round_trip(tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 1200, "output_length": 9, "hash_ids": [0, 1, 2]},
        {"timestamp": 10, "input_length": 1100, "output_length": 4, "hash_ids": [0, 1, 3]},
        {"timestamp": 27, "input_length": 512, "output_length": 4, "hash_ids": [0]},
        {"timestamp": 3000, "input_length": 700, "output_length": 1, "hash_ids": [4, 5]},
    ]
    stream = read_stream(written(tmp_path, *lines))
    assert [json.loads(line) for line in mooncake_lines(stream.arrivals())] == lines


def test_a_random_stream_in_mooncakes_form_shares_what_it_shared(tmp_path):
    made = random_stream(requests=50, documents=3, document=parse_lengths("1024"), rate=5.0)
    again = read_stream(written(tmp_path, *mooncake_lines(made.arrivals())))
    pairs = list(zip(made.arrivals(), again.arrivals(), strict=True))
    for ours, theirs in pairs:
        assert (ours.prompt, ours.output) == (theirs.prompt, theirs.output)
        assert theirs.arrival == pytest.approx(ours.arrival, abs=0.001)
    # One document is two ids, the question a third.
    assert {len(theirs.prefix) for _, theirs in pairs} == {3}
    assert len({theirs.prefix[:2] for _, theirs in pairs}) == 3
    assert len({theirs.prefix[2] for _, theirs in pairs}) == 50


GOOD = {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: is no JSON"),
        ("[1]", "must be an object"),
        ({**GOOD, "input_length": 0}, "input_length = 0"),
        ({**GOOD, "output_length": "9"}, "output_length = '9'"),
        ({**GOOD, "timestamp": -1}, "timestamp = -1"),
        ({**GOOD, "hash_ids": [0, 1, 2]}, "at most 2 whole numbers"),
        ({**GOOD, "colour": 1}, "colour"),
        ({"prompt": 4}, "output = None"),
        ({"prompt": 4, "output": 1, "prefix": [["a", 5]]}, "at most 4 tokens"),
        ({"prompt": 4, "output": 1, "prefix": ["a"]}, "pairs"),
        ("", "holds no request"),
    ],
)
def test_a_line_that_is_no_request_is_refused(tmp_path, line, message):
    with pytest.raises(StreamError, match=message):
        read_stream(written(tmp_path, line))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(StreamError, match="cannot be read"):
        read_stream(tmp_path / "none.jsonl")
