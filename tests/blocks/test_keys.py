"""KeyIndex against a dict that remembers in which order keys came."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe.blocks.keys import KeyIndex

BLOCKS, GROUPS, HASHES = 150, 2, 6
# Hashes whose first words are alike, so that chains of buckets grow long.
POOL = [bytes([number % 2] + [0] * 30 + [number]) for number in range(HASHES)]


def words(digests: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 4).copy()


changes = st.lists(
    st.tuples(
        st.sampled_from(["add", "add many", "remove"]),
        st.sets(st.integers(1, BLOCKS - 1), min_size=1, max_size=120).map(sorted),
        st.integers(0, GROUPS - 1),
        st.randoms(use_true_random=False),
        st.booleans(),  # whether anything is asked then; until then keys may wait to be written and linked
    ),
    max_size=12,
)


@given(changes)
def test_the_oldest_block_of_a_key_is_found(story):
    index = KeyIndex(BLOCKS)
    held: dict[int, tuple[int, bytes]] = {}  # in the order in which the keys came
    for change, blocks, group, choices, asked in [*story, ("remove", [], 0, random.Random(0), True)]:
        choices.shuffle(blocks)
        if change == "remove":
            groups = [held[block][0] for block in blocks if block in held]
            assert dict(index.remove_many(np.array(blocks, np.intp))) == Counter(groups)
            for block in blocks:
                held.pop(block, None)
        else:
            free = [block for block in blocks if block not in held]
            digests = [choices.choice(POOL) for _ in free]
            if change == "add many" and free:
                index.add_many(np.array(free, np.intp), group, words(digests))
            else:
                index.add_few(free, group, digests)
            held.update(zip(free, ((group, digest) for digest in digests), strict=True))
        assert [block in index for block in range(1, BLOCKS)] == [block in held for block in range(1, BLOCKS)]
        assert [index.group(block) for block in held] == [group for group, _ in held.values()]
        if not asked:
            continue
        assert [index.digest(block) for block in held] == [digest for _, digest in held.values()]
        oldest: dict[tuple[int, bytes], int] = {}
        for block, key in held.items():
            oldest.setdefault(key, block)
        for at in range(GROUPS):
            expected = [oldest.get((at, digest), 0) for digest in POOL]
            assert [index.find(at, digest) for digest in POOL] == expected
            assert index.find_many(at, words(POOL)).tolist() == expected
        assert index.distinct() == len(oldest)


@pytest.mark.parametrize("many", [False, True])
def test_keys_are_found_by_their_whole_hash_and_group(many):
    index = KeyIndex(8)
    if many:
        index.add_many(np.array([3]), 1, words(POOL[:1]))
    else:
        index.add(3, 1, POOL[0])
    assert (index.find(1, POOL[0]), index.find(0, POOL[0]), index.find(1, POOL[2])) == (3, 0, 0)
    assert index.digest(3) == POOL[0]
