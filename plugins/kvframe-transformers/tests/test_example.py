"""The example runs, and its numbers are what the lengths of its texts say."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the bridge needs torch and transformers")
pytest.importorskip("transformers", reason="the bridge needs transformers")

EXAMPLE = Path(__file__).parents[3] / "examples" / "chat_with_prefix_cache.py"


def test_the_chat_computes_only_what_is_new_and_answers_the_same(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    turns = [line for line in said.splitlines() if "found" in line]
    assert len(turns) == 10
    assert all(line.endswith("the same answer as without the pool") for line in turns)
    # "You are … up. " has 93 bytes: 5 blocks of 16 tokens and 13 more
    assert said.startswith("80 tokens of the system prompt are in blocks")
    # later turns compute the last token of the answer before, the question, and 7 of 8 new tokens
    later = turns[1:5] + turns[6:]
    questions = (17, 25, 21, 19) * 2
    computed = [int(line.split("found, ")[1].split()[0]) for line in later]
    assert computed == [1 + length + 7 for length in questions]
