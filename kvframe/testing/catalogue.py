"""All checks in the order in which they are run: what others stand on comes first."""

from __future__ import annotations

from kvframe.testing.checks import blocks, lifetimes, merging, planning, plugins, sizing, specs, values, views
from kvframe.testing.outcome import Check
from kvframe.testing.subject import PluginSubject, Subject

FAMILY_CHECKS: tuple[Check[Subject], ...] = tuple(
    Check(function)
    for function in (
        specs.examples_are_of_the_family,
        specs.specs_answer_the_protocol,
        specs.specs_cannot_change,
        specs.specs_hash_by_value,
        specs.specs_say_what_they_are,
        specs.specs_survive_pickle,
        specs.families_answer_with_their_types,
        specs.promotion_keeps_every_byte,
        specs.retaining_keeps_longer,
        specs.facts_are_in_range,
        specs.raw_storage_has_no_geometry,
        values.numbers_below_zero_are_refused,
        values.words_for_numbers_are_refused,
        values.unknown_dtypes_are_refused,
        values.a_block_of_nothing_is_refused,
        values.padding_never_cuts_a_page,
        merging.merge_never_raises,
        merging.merge_of_equals_changes_nothing,
        merging.merge_ignores_order,
        merging.merge_in_parts_is_the_same,
        merging.merge_follows_the_fields,
        merging.merge_keeps_pages_and_lifetimes,
        merging.refusals_name_every_layer,
        merging.one_table_means_one_need,
        lifetimes.the_lifetime_has_the_specs_block,
        lifetimes.lifetimes_compare_by_value,
        lifetimes.nothing_is_dead_that_is_still_written,
        lifetimes.the_window_is_kept,
        lifetimes.dead_entries_stay_dead,
        lifetimes.arrays_and_numbers_agree,
        lifetimes.longer_prompts_keep_more,
        lifetimes.the_peak_is_what_a_request_holds,
        lifetimes.steady_from_keeps_its_word,
        lifetimes.the_next_death_is_the_first,
        lifetimes.hits_fit_the_spec,
        sizing.pages_hold_their_content,
        sizing.states_cover_every_token,
        sizing.pages_grow_with_the_block,
        sizing.a_new_block_size_keeps_the_rest,
        sizing.sizing_covers_the_need,
        sizing.sizing_is_tight,
        sizing.sizing_never_falls,
        sizing.sizing_counts_whole_pages,
        sizing.table_rows_hold_every_entry,
        sizing.context_parallel_sizing_covers_the_need,
        views.views_are_windows_on_the_buffer,
        views.views_stay_in_their_block,
        views.views_do_not_overlap,
        views.views_cover_the_content,
        views.views_are_the_same_in_every_layout,
        views.blocks_can_be_moved,
        views.tokens_come_back,
        planning.a_model_of_it_can_be_planned,
        planning.plans_share_no_byte,
        planning.plans_survive_json,
        planning.plans_ignore_the_order_of_layers,
        planning.a_planned_request_fits,
        blocks.resumed_requests_find_what_they_read,
        blocks.tokens_survive_a_thousand_steps,
    )
)

PLUGIN_CHECKS: tuple[Check[PluginSubject], ...] = tuple(
    Check(function)
    for function in (
        plugins.the_plugin_is_in_use,
        plugins.it_imports_no_heavy_library,
        plugins.it_bounds_its_kvframe,
        plugins.its_hooks_are_marked,
        plugins.it_loads_the_same_twice,
        plugins.its_families_are_the_ones_in_use,
        plugins.its_dtypes_pack_their_cells,
    )
)
