"""Checks of block management: the manager knows the family by its lifetime alone, and the tokens must survive it."""

from __future__ import annotations

from kvframe.testing.outcome import expect
from kvframe.testing.simulate import dead_entries
from kvframe.testing.subject import Subject
from kvframe.testing.viewing import with_small_block
from kvframe.testing.world import World

STEPS = 1000  # random manager steps a family
_BLOCKS = (4, 16, 64, 256)  # tokens: small blocks, so that many are filled and freed


def resumed_requests_find_what_they_read(subject: Subject) -> None:
    """An entry that a request reads after n tokens is one that a request resumed at n finds by a prefix hit.

    Why: a hit brings the entries outside `dead(n, n)`; a running request must not read others, or resuming differs.
    What to do: give `dead` a `prompt` that matters only for tokens that were the prompt's.
    """
    for spec in subject.examples:
        lifetime = subject.lifetime(spec)
        if lifetime.state or lifetime.fixed is not None or lifetime.hits != "keyed":
            continue
        for count in range(1, 40):
            n = count * lifetime.block
            lost = dead_entries(lifetime, n, n, count) - dead_entries(lifetime, n, 1, count)
            text = f"a request with a prompt of 1 reads entries {sorted(lost)[:4]} after {n} tokens"
            expect(not lost, spec, f"{text}, and one that resumes there does not have them")


def tokens_survive_a_thousand_steps(subject: Subject) -> None:
    """Over 1,000 random steps of requests that come, share prefixes, are preempted and go, no token is lost.

    Every token that is read is there, dead entries are given back, hits are the longest that a search entry by entry
    finds, and no block is lost.

    Why: it is what an engine does all day. The family stands beside full attention, as in hybrid models.
    What to do: the message says which entry was read after how many tokens; look at what `dead` says there.
    """
    share = -(-STEPS // max(1, len(subject.examples)))
    for seed, spec in enumerate(subject.examples):
        small = with_small_block(spec, _BLOCKS)
        World(small, subject.lifetime(small), seed).run(share)
