"""Families that are wrong on purpose: the conformance kit catches each, by the check that names its fault."""

from __future__ import annotations

import pytest

from kvframe import KVQuantMode, Paging, Traits
from kvframe.testing import FAILED, FAMILY_CHECKS, SKIPPED, run
from tests.testing import families as f

CHECKS = {check.name: check for check in FAMILY_CHECKS}
pytest.importorskip("torch", reason="checks of views need torch: pip install 'kvframe[torch]'")


def lifetime(rule, **fields):
    return f.family(lifetime=lambda spec: f.window_of(spec, rule, **fields))


# Each fault: what is wrong, the check that must find it, and words of its message.
MUTANTS = {
    # the spec
    "no examples": (f.subject(f.family(), specs=()), "examples_are_of_the_family", "no examples"),
    "a float page": (f.subject(f.family(f.FloatPage)), "specs_answer_the_protocol", "page_size_bytes"),
    "fields that can be set": (
        f.subject(f.family(f.Mutable), specs=(f.Mutable(),)),
        "specs_cannot_change",
        "block_size",
    ),
    "a list in a field": (f.subject(f.family(f.HoldsAList)), "specs_cannot_change", "marks holds a list"),
    "equality by identity": (f.subject(f.family(f.ByIdentity)), "specs_hash_by_value", "not equal to a copy"),
    "a repr that hides": (f.subject(f.family(f.Nameless)), "specs_say_what_they_are", "hides the block size"),
    "a class inside a function": (f.subject(f.family(f.local_class())), "specs_survive_pickle", "pickle"),
    "no lifetime": (
        f.subject(f.family(lifetime=lambda spec: spec.window)),
        "families_answer_with_their_types",
        "which is no Lifetime",
    ),
    "a promotion of other bytes": (
        f.subject(f.family(promote=f.padded_promotion)),
        "promotion_keeps_every_byte",
        "its promotion has pages of",
    ),
    "a retain that does nothing": (
        f.subject(f.family(retain=lambda spec, tokens: spec)),
        "retaining_keeps_longer",
        "with 5 tokens retained",
    ),
    "a table alignment of 0": (
        f.subject(f.family(f.BadAlignment)),
        "facts_are_in_range",
        "block_table_token_alignment",
    ),
    "geometry of raw pages": (
        f.subject(f.family(f.RawWithGeometry)),
        "raw_storage_has_no_geometry",
        "has no layer views",
    ),
    # its values
    "a negative window": (
        f.subject(f.family(f.NegativeWindow)),
        "numbers_below_zero_are_refused",
        "takes window = -1",
    ),
    "text for a number": (
        f.subject(f.family(f.TextWindow)),
        "words_for_numbers_are_refused",
        "takes window = 'many'",
    ),
    "any dtype": (f.subject(f.family(f.AnyDtype)), "unknown_dtypes_are_refused", "takes dtype"),
    "a block of nothing": (
        f.subject(f.family(f.AnyBlock)),
        "a_block_of_nothing_is_refused",
        "takes a block of 0",
    ),
    "padding that cuts": (
        f.subject(f.family(f.CutPage)),
        "padding_never_cuts_a_page",
        "takes page_size_padded",
    ),
    # merging
    "a merge that asserts": (f.subject(f.family(merge=f.asserts)), "merge_never_raises", "AssertionError"),
    "a merge that counts": (
        f.subject(f.family(merge=f.counts)),
        "merge_of_equals_changes_nothing",
        "merged with itself",
    ),
    "the first layer wins": (f.subject(f.family(merge=f.first_wins)), "merge_ignores_order", "by order"),
    "a merge by number": (
        f.subject(f.family(merge=f.three_are_too_many)),
        "merge_in_parts_is_the_same",
        "in parts",
    ),
    "a field that is lost": (
        f.subject(f.family(merge=f.first_wins)),
        "merge_follows_the_fields",
        "against its policy",
    ),
    "the widest window for all": (
        f.subject(f.family(f.WidestWindow)),
        "merge_keeps_pages_and_lifetimes",
        "its lifetime",
    ),
    "a refusal that says nothing": (
        f.subject(f.family(merge=f.refuses_in_silence)),
        "refusals_name_every_layer",
        "without field or rule",
    ),
    "a window that is no part of the rule's equality": (
        f.subject(lifetime(f.HiddenWindow)),
        "one_table_means_one_need",
        "needs other entries",
    ),
    # the lifetime
    "entries of one token": (
        f.subject(f.family(lifetime=lambda spec: f.Window(block=1, window=spec.window))),
        "the_lifetime_has_the_specs_block",
        "blocks of 1 tokens",
    ),
    "a rule by identity": (
        f.subject(lifetime(f.RuleByIdentity)),
        "lifetimes_compare_by_value",
        "is not equal",
    ),
    "rounded up": (
        f.subject(lifetime(f.RoundedUp)),
        "nothing_is_dead_that_is_still_written",
        "and still in use",
    ),
    "one token too many": (f.subject(lifetime(f.OneTooMany)), "the_window_is_kept", "in a window of 50"),
    "the dead come back": (f.subject(lifetime(f.ComesBack)), "dead_entries_stay_dead", "are dead, after 99"),
    "no arrays": (f.subject(lifetime(f.NumbersOnly)), "arrays_and_numbers_agree", "shapes"),
    "the prompt dies first": (
        f.subject(lifetime(f.PromptDiesFirst)),
        "longer_prompts_keep_more",
        "a longer prompt frees more",
    ),
    "a peak without tokens in flight": (
        f.subject(lifetime(f.PeakTooSmall)),
        "the_peak_is_what_a_request_holds",
        "and it holds",
    ),
    "steady too soon": (
        f.subject(lifetime(f.SteadyTooSoon)),
        "steady_from_keeps_its_word",
        "after its steady_from",
    ),
    "wakes late": (f.subject(lifetime(f.WakesLate)), "the_next_death_is_the_first", "next_death"),
    "keyed without a cache": (f.subject(f.family(f.NotCacheable)), "hits_fit_the_spec", "hits='keyed'"),
    # sizing
    "a header in the page": (f.subject(f.family(f.HeaderInPage)), "pages_hold_their_content", "H * N * C"),
    "silent rounding": (f.subject(f.family(f.SilentRounding)), "states_cover_every_token", "cover 15"),
    "a constant in the page": (
        f.subject(f.family(f.HeaderInPage)),
        "pages_grow_with_the_block",
        "with 2 times the block",
    ),
    "a block that stays": (
        f.subject(f.family(f.KeepsItsBlock)),
        "a_new_block_size_keeps_the_rest",
        "becomes",
    ),
    "a bound that is too small": (
        f.subject(f.family(f.BoundTooSmall)),
        "sizing_covers_the_need",
        "and holds",
    ),
    "a bound that is too large": (
        f.subject(f.family(f.BoundTooLarge)),
        "sizing_is_tight",
        "though no request holds more",
    ),
    "a need that falls": (f.subject(f.family(f.Falls)), "sizing_never_falls", "with max_model_len"),
    "half pages": (f.subject(f.family(f.HalfPages)), "sizing_counts_whole_pages", "no multiple"),
    "rows that are too short": (
        f.subject(f.family(f.ShortRows)),
        "table_rows_hold_every_entry",
        "its row has",
    ),
    "context parallel ranks forgotten": (
        f.subject(f.family(f.BoundTooSmall, traits=Traits(event_kind="sliding_window"))),
        "context_parallel_sizing_covers_the_need",
        "dcp=2",
    ),
    # views
    "a copy": (f.subject(f.family(make_views=f.copied_views)), "views_are_windows_on_the_buffer", "'key'"),
    "every block is block 0": (
        f.subject(f.family(make_views=f.straying_views)),
        "views_stay_in_their_block",
        "'value'",
    ),
    "overlap": (f.subject(f.family(make_views=f.overlapping_views)), "views_do_not_overlap", "share"),
    "hidden bytes": (
        f.subject(f.family(make_views=f.partial_views)),
        "views_cover_the_content",
        "no view of layer",
    ),
    "names by stride": (
        f.subject(f.family(make_views=f.views_by_stride)),
        "views_are_the_same_in_every_layout",
        "has views",
    ),
    "a view of another block": (
        f.subject(f.family(make_views=f.straying_views)),
        "blocks_can_be_moved",
        "does not show the copy",
    ),
    "a codec that doubles": (
        f.subject(
            f.family(),
            specs=f.examples(kv_quant_mode=KVQuantMode.TURBOQUANT_K8V4)[:1],
            hooks={"kvframe_cache_dtypes": f.doubling_dtype},
        ),
        "tokens_come_back",
        "with an error of 7",
    ),
    # planning and the block manager
    "pages that cannot grow": (
        f.subject(f.family(f.TwoBlockSizes, paging=Paging(pads=False))),
        "a_model_of_it_can_be_planned",
        "cannot be planned",
    ),
    "a hook that looks at the order": (
        f.subject(f.family(), hooks={"kvframe_adjust_specs": f.pads_the_first_layer}),
        "plans_ignore_the_order_of_layers",
        "with its layers reversed",
    ),
    "a field that JSON has not": (f.subject(f.family(f.NoJson)), "plans_survive_json", "note"),
    "a reserve that is too small": (
        f.subject(lifetime(f.PeakTooSmall)),
        "a_planned_request_fits",
        "and one holds",
    ),
    "a hit that lacks what is read": (
        f.subject(lifetime(f.PromptStays)),
        "resumed_requests_find_what_they_read",
        "does not have them",
    ),
    "tokens that come back to life": (
        f.subject(lifetime(f.PromptStays)),
        "tokens_survive_a_thousand_steps",
        "given back or hold another prefix",
    ),
}


def test_the_right_family_passes_every_check():
    outcomes = [run(check, f.subject(f.family())) for check in FAMILY_CHECKS]
    assert [outcome for outcome in outcomes if outcome.status == FAILED] == []
    # only one check says nothing about a sliding window
    assert {outcome.check for outcome in outcomes if outcome.status == SKIPPED} == {
        "raw_storage_has_no_geometry",
        "context_parallel_sizing_covers_the_need",
    }


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_wrong_family_is_caught_by_the_check_that_names_the_fault(fault):
    subject, name, said = MUTANTS[fault]
    outcome = run(CHECKS[name], subject)
    assert outcome.status == FAILED
    assert said in outcome.message
    assert "What to do:" in outcome.explanation


def test_every_check_has_a_family_that_fails_it():
    unproved = set(CHECKS) - {name for _, name, _ in MUTANTS.values()}
    # pages that overlap are refused before: by the checks of sizing, and by the planner itself
    assert unproved == {"plans_share_no_byte"}
