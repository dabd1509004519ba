"""`kvframe check`: the conformance checks, run on what is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import click
from packaging.utils import canonicalize_name

from kvframe.cli.output import console, table
from kvframe.discovery import BLOCKED, PluginRecord
from kvframe.errors import UnknownPluginError
from kvframe.plugins import PluginHost, load_plugins
from kvframe.testing import (
    FAILED,
    FAMILY_CHECKS,
    PASSED,
    PLUGIN_CHECKS,
    SKIPPED,
    Check,
    Outcome,
    PluginSubject,
    Subject,
)
from kvframe.testing import run as run_check

_Work = tuple[Check[Any], Any]


@click.command("check", epilog="Example:  kvframe check --json")
@click.argument("distribution", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def command(distribution: str | None, as_json: bool) -> int:
    """Run the conformance checks on installed plugins: on those of DISTRIBUTION, or on all.

    They need no test suite of the plugin's author, only the examples that its families register. The exit code is 1 if
    a check fails. Checks of views need torch; without it they are skipped.
    """
    host = load_plugins()
    records = _chosen(host, distribution)
    work = [(record, pair) for record in records for pair in _work(record, host)]
    outcomes = [(record, outcome) for record, outcome in _run(work, show=not as_json)]
    failed = [outcome for _, outcome in outcomes if outcome.status == FAILED]
    if as_json:
        checks = [{"plugin": record.name, **attrs.asdict(outcome)} for record, outcome in outcomes]
        click.echo(json.dumps({"passed": not failed, "checks": checks}, indent=2))
    else:
        _show(records, outcomes)
    return 1 if failed else 0


def _chosen(host: PluginHost, distribution: str | None) -> list[PluginRecord]:
    records = [record for record in host.records if record.status != BLOCKED]
    if distribution is None:
        return records
    found = [record for record in records if canonicalize_name(distribution) in record.known_as]
    if not found:
        known = sorted(record.distribution or record.name for record in records)
        raise UnknownPluginError(unknown=(distribution,), found=known, source="kvframe check")
    return found


def _work(record: PluginRecord, host: PluginHost) -> Iterator[_Work]:
    """The checks of one plugin, and of each of its families that is in use."""
    plugin = PluginSubject(record=record, host=host)
    yield from ((check, plugin) for check in PLUGIN_CHECKS)
    for name in record.families:
        family = host.families.get(name)
        if family is not None and host.provider("families", name) is record:
            subject = Subject(family=family, examples=family.examples, host=host)
            yield from ((check, subject) for check in FAMILY_CHECKS)


def _run(work: Sequence[tuple[PluginRecord, _Work]], *, show: bool) -> Iterator[tuple[PluginRecord, Outcome]]:
    from rich.console import Console
    from rich.progress import Progress

    # on standard error, and on a terminal only: the table is what a pipe gets
    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not (show and terminal.is_terminal)) as progress:
        task = progress.add_task("checking", total=len(work))
        for record, (check, subject) in work:
            progress.update(task, description=f"{subject}: {check.name}")
            yield record, run_check(check, subject)
            progress.advance(task)


def _show(records: Sequence[PluginRecord], outcomes: Sequence[tuple[PluginRecord, Outcome]]) -> None:
    rows = []
    for record in records:
        for subject in dict.fromkeys(outcome.subject for owner, outcome in outcomes if owner is record):
            found = [
                outcome.status
                for owner, outcome in outcomes
                if owner is record and outcome.subject == subject
            ]
            rows.append(
                (record.label, subject, *(found.count(status) for status in (PASSED, FAILED, SKIPPED)))
            )
    headings = ("plugin", "checks of", "passed", "failed", "not applicable")
    console().print(table(headings, rows, numbers=headings[2:]), highlight=False)
    for _, outcome in outcomes:
        if outcome.status == FAILED:
            click.echo(f"FAILED {outcome.subject}: {outcome.check}\n  {outcome.message}")
            click.echo("".join(f"    {line}\n" for line in outcome.explanation.splitlines()))
    total = sum(outcome.status == FAILED for _, outcome in outcomes)
    click.echo(
        f"{len(outcomes)} checks, {total} failed." if total else f"{len(outcomes)} checks, none failed."
    )
