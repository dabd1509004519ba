"""The design's figures, at a scale that tests can afford: useful bytes under churn, and hits of shared documents."""

import pytest

from kvframe.planning import Limits
from kvframe.simulate import Lengths, Pace, RandomStream, run_case
from tests.simulate.bytewise import bytewise
from tests.simulate.models import GIB, chats, hybrid_case

# Share of a 40 GiB pool in useful bytes when the first chat of 16 to 1,024 tokens does not fit: at least so much.
USEFUL = {
    "gemma-3-27b": (700, 0.975, 0.89),
    "20 full + 30 sliding": (1600, 0.98, 0.84),
    "qwen3-next-80b": (3000, 0.985, 0.93),
    "nemotron-h-8b": (3000, 0.99, 0.97),
}
FAST = Pace(ramp=0.1)


@pytest.mark.parametrize("name", USEFUL)
def test_a_full_pool_is_full_of_useful_bytes(name):
    requests, at_least, one_page_size = USEFUL[name]
    ours = run_case(hybrid_case(name, chats(requests), pace=FAST))
    assert ours.useful_at_first_refusal >= at_least
    engines = run_case(hybrid_case(name, chats(requests), pace=FAST, strategy="engine"))
    assert engines.useful_at_first_refusal <= one_page_size
    assert engines.alive_at_first_refusal < ours.alive_at_first_refusal


# --- shared documents ---

DOCUMENTS = RandomStream(
    requests=160,
    prompt=Lengths(low=16, high=128),
    output=Lengths(low=16, high=256),
    rate=1.5,
    documents=25,
    document=Lengths(low=512, high=2048),
    skew=1.0,
    seed=1,
)


def documents(name, **more):
    return hybrid_case(name, DOCUMENTS, memory=CROWDED[name], length=16_384, limits=Limits(groups=4), **more)


# Bytes of the pool: so few that not all documents stay.
CROWDED = {"gemma-3-27b": 10 * GIB, "20 full + 30 sliding": 5 * GIB, "mimo-v2-flash": 4 * GIB}


@pytest.mark.parametrize("name", CROWDED)
def test_shared_documents_are_found_about_as_often_as_bytes_allow(name):
    ours = run_case(documents(name))
    engines = run_case(documents(name, strategy="engine"))
    with bytewise():
        ideal = run_case(documents(name))
    assert ours.hit_rate >= engines.hit_rate
    assert ours.hit_rate >= ideal.hit_rate - 0.03
