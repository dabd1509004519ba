"""The engine of examples/ serves every installed family as the same model does with dense, unpaged tensors."""

import functools
import json
import random
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="the engine's model is in torch: pip install 'kvframe[torch]'")

from mini_engine import MiniEngine, main  # noqa: E402
from mini_model import MAX_LEN, WORDS, embed, logits, normed  # noqa: E402

from kvframe import load_plugins  # noqa: E402
from kvframe.errors import InsufficientMemoryError  # noqa: E402

FILE = Path(__file__).parents[1] / "examples" / "mini_engine.py"
HOST = load_plugins()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The tensors are small: threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


EXAMPLES = [(name, i) for name, family in HOST.families.items() for i in range(len(family.examples))]
# Rows or states that only the family's own kernels can read and write.
OWN_KERNELS = {("mla", 1), ("sliding_window_mla", 1), ("mamba", 3)}
SERVED = [example for example in EXAMPLES if example not in OWN_KERNELS]
# No later request finds anything where one of these is among the layers.
NO_HITS = {("mamba", 0), ("cross_attention", 0), ("cross_attention", 1)}


def prompts(count, stem=0, seed=0):
    """Prompts that begin alike and go on differently."""
    words = random.Random(seed)
    first = [words.randrange(WORDS) for _ in range(stem)]
    return [first + [words.randrange(WORDS) for _ in range(words.randrange(9, 30))] for _ in range(count)]


def served(engine, asked, wanted):
    requests = [engine.add(prompt, wanted) for prompt in asked]
    while engine.waiting or engine.running:
        engine.step()
    return requests


# --- the same model without paging: whole sequences, dense tensors, every rule token by token ----------------------


@functools.cache
def readable(lifetime, prompt):
    """Which tokens read which, [query, key] up to the longest request, by the lifetime alone, token by token."""

    def reads(query, key):
        entry = key // lifetime.block
        if lifetime.hits == "free":  # its own entry: nothing else is there after a hit
            return entry == query // lifetime.block
        low, high = dead[query]
        return not low <= entry < high

    dead = [lifetime.dead(query + lifetime.slack, prompt) for query in range(MAX_LEN)]
    table = [[key <= query and reads(query, key) for key in range(MAX_LEN)] for query in range(MAX_LEN)]
    return torch.tensor(table)


def attention(layer, x, keys_of, mask):
    key, value = layer.key_value(keys_of)
    value = key if value is None else value
    query = layer.query(x).float().unflatten(1, (key.shape[1], 2))
    scores = torch.einsum("qhgd,khd->hgqk", query, key.float()) * layer.cells.head_size**-0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return layer.output(torch.einsum("hgqk,khd->qhgd", weights, value.float()).flatten(1, 2))


def states(layer, x, shapes):
    kept = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    return torch.stack([layer.advance(kept, token) for token in x])


def dense(engine, prompt, wanted):
    """The tokens that the model generates, computed anew for each of them."""
    tokens, count = list(prompt), len(prompt)
    for _ in range(wanted):
        x = embed(tokens, range(len(tokens)))
        encoder = normed(embed(prompt, range(count)))
        for name, layer in engine.layers.items():
            rule, inputs = layer.lifetime, normed(x)
            if rule.fixed == 0:
                out = attention(layer, inputs, inputs, torch.eye(len(tokens), dtype=torch.bool))
            elif layer.is_state:
                shapes = {part: (view.shape[1:], view.dtype) for part, view in engine.views[name].items()}
                out = states(layer, inputs, shapes)
            elif rule.source == "encoder":
                out = attention(layer, inputs, encoder, torch.ones(len(tokens), count, dtype=torch.bool))
            else:
                mask = readable(rule, count)[: len(tokens), : len(tokens)]
                out = attention(layer, inputs, inputs, mask)
            x = x + out
        tokens.append(int(logits(x[-1:]).argmax()))
    return tokens


# --- the tests -------------------------------------------------------------------------------------------------------


def test_every_installed_family_is_served():
    assert {name for name, _ in SERVED} == set(HOST.families)


@pytest.mark.parametrize(("family", "example"), SERVED)
def test_tokens_are_those_of_dense_tensors(family, example):
    engine = MiniEngine(family, example, host=HOST)
    requests = served(engine, prompts(3), wanted=4)
    assert [one.tokens for one in requests] == [dense(engine, one.prompt, 4) for one in requests]
    assert engine.most_running == 3  # served together
    assert engine.manager.pool.num_held == 0


@pytest.mark.parametrize(("family", "example"), [one for one in SERVED if one not in NO_HITS])
def test_prefix_hits_change_no_token(family, example):
    engine = MiniEngine(family, example, host=HOST)
    first, second = prompts(2, stem=128)
    (early,) = served(engine, [first], wanted=2)
    (late,) = served(engine, [second], wanted=3)
    assert early.hit_tokens == 0
    assert late.hit_tokens == 128  # whole blocks of 128 tokens or less, in every group
    assert late.tokens == dense(engine, second, 3)


@pytest.mark.parametrize(("family", "example"), sorted(NO_HITS))
def test_where_hits_are_forbidden_there_are_none(family, example):
    engine = MiniEngine(family, example, host=HOST)
    first, second = served(engine, prompts(2, stem=64), wanted=2)
    assert first.hit_tokens == second.hit_tokens == 0


# One example of each family: the others differ from it in numbers.
FIRST = list({family: (family, i) for family, i in reversed(SERVED)}.values())


def tight(family, example):
    """An engine with as few slabs as one of the longest requests needs."""
    engine = MiniEngine(family, example, room=1, host=HOST)
    while True:
        pool = engine.config.pools["device"]
        try:
            engine = MiniEngine(family, example, room=pool.size_bytes - pool.slab_bytes, host=HOST)
        except InsufficientMemoryError:
            return engine


@pytest.mark.parametrize(("family", "example"), FIRST)
def test_preemption_changes_no_token(family, example):
    # One request of 160 tokens fits: 10 blocks. Six begin with 1 or 2 blocks each, and reach 39 to 59 tokens: 3 or 4.
    engine = tight(family, example)
    asked = prompts(6, seed=1)
    requests = served(engine, asked, wanted=30)
    roomy = served(MiniEngine(family, example, room=8, host=HOST), asked, wanted=30)
    assert [one.tokens for one in requests] == [one.tokens for one in roomy]
    assert sum(one.preemptions for one in roomy) == 0
    # What is taken once, for a request's whole life, keeps others out instead.
    rules = [layer.lifetime for layer in engine.layers.values()]
    if all(rule.fixed in (None, 0) and rule.source == "decoder" for rule in rules):
        assert sum(one.preemptions for one in requests) > 0


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_serves_and_answers_in_json():
    answer = CliRunner().invoke(main, ["sliding_window", "--requests", "3", "--json"])
    assert answer.exit_code == 0, answer.output
    report = json.loads(answer.output.splitlines()[-1])
    # 40 tokens that all share, 20 of their own, 60 generated
    assert [len(one["tokens"]) for one in report["requests"]] == [120, 120, 120]
    # the first chunk of 24 tokens fills one block of 16, which the next request finds in the same step
    assert [one["hit"] >= 16 for one in report["requests"]] == [False, True, True]


def test_the_command_shows_the_pool():
    answer = CliRunner().invoke(main, ["mamba", "--example", "1", "--requests", "2"])
    assert answer.exit_code == 0, answer.output
    assert "2 done" in answer.output
    assert "mamba" in answer.output
    assert "full_attention" in answer.output


@pytest.mark.parametrize("words", [["mla", "--example", "1"], ["mla", "--example", "9"], ["nothing"]])
def test_what_cannot_be_served_is_said_in_a_line(words):
    answer = CliRunner().invoke(main, words)
    assert answer.exit_code == 1
    assert re.match(r"Error: (--example|FAMILY) ", answer.output)


def test_help_has_examples():
    assert "Examples:" in CliRunner().invoke(main, ["--help"]).output


def test_it_is_an_engine_of_300_lines_that_names_no_kind_of_cache():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 300
    code = text.partition("@click.command")[0] + FILE.with_name("mini_model.py").read_text()
    assert [name for name in HOST.families if re.search(rf"\b{name}\b", code)] == []
