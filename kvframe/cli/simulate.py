"""`kvframe simulate`: a plan and its block manager under a stream of requests, on no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvframe.cli.model import model_options
from kvframe.cli.options import new_file, parse_numbers, parse_size
from kvframe.errors import UsageError
from kvframe.plugins import load_plugins

if TYPE_CHECKING:
    from kvframe.simulate import Case, RandomStream, RecordedStream, Result

_EPILOG = """
\b
Examples:
  kvframe simulate config.json --memory 40GiB
  kvframe simulate config.json --memory 40GiB --requests 100000 --prompt 8-512 --output 8-512
  kvframe simulate config.json --memory 40GiB --documents 100 --document 2048-8192 --rate 4
  kvframe simulate config.json --memory 40GiB --stream trace.jsonl --html report.html
  kvframe simulate config.json --memory 20GiB,40GiB --strategy optimal,engine --jobs 4
  kvframe simulate config.json --memory 40GiB --eviction lru,frequency --ray auto

\b
Lengths are tokens: 512, 16-1024 (uniform), or lognormal:400,0.8,4096 (median, sigma, longest).
A stream is JSON lines, in kvframe's form or that of the Mooncake traces:
  {"arrival": 0.25, "prompt": 1200, "output": 180, "prefix": [["manual", 1024]]}
  {"timestamp": 250, "input_length": 1200, "output_length": 180, "hash_ids": [7, 8, 31]}
"""
_RANDOM = ("prompt", "output", "rate", "documents", "document", "skew")


def _sizes(value: Any) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else tuple(parse_size(part) for part in value.split(","))


def _names(value: Any) -> tuple[str, ...]:
    return (
        value
        if isinstance(value, tuple)
        else tuple(part.strip() for part in value.split(",") if part.strip())
    )


def _stream_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(
        (
            click.option(
                "--requests", type=click.IntRange(1), help="Requests; of a recorded stream the first so many."
            ),
            click.option(
                "--prompt", metavar="LENGTHS", help="Prompt without the document.  [default: 16-1024]"
            ),
            click.option("--output", metavar="LENGTHS", help="Tokens generated.  [default: 16-512]"),
            click.option(
                "--rate",
                type=click.FloatRange(0, min_open=True),
                help="Requests a second (Poisson); default: all wait from the start.",
            ),
            click.option(
                "--documents", type=click.IntRange(1), help="Shared documents, one in front of each prompt."
            ),
            click.option("--document", metavar="LENGTHS", help="Tokens of a document.  [default: 512-4096]"),
            click.option(
                "--skew",
                type=click.FloatRange(0),
                help="Document i is drawn with weight 1 / i^SKEW.  [default: 1]",
            ),
            click.option("--seed", default=0, show_default=True, help="Of the random numbers."),
            click.option(
                "--stream",
                "stream_file",
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="A recorded stream instead of a random one.",
            ),
        )
    ):
        function = option(function)
    return function


def _engine_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(
        (
            click.option(
                "--max-model-len", type=click.IntRange(1), help="Longest request; default: the config's."
            ),
            click.option("--no-prefix-caching", is_flag=True, help="Requests share no blocks."),
            click.option("--layout", help="Memory layout of the pool; default: the strategy chooses."),
            click.option(
                "--max-requests", type=click.IntRange(1), default=4096, show_default=True, help="At once."
            ),
            click.option(
                "--retention-interval",
                type=click.IntRange(0),
                help="As the engines' option: 0 keeps only what a prompt can be resumed from.",
            ),
            click.option(
                "--watermark",
                type=click.FloatRange(0, 1, max_open=True),
                default=0.0,
                help="Share kept free.",
            ),
            click.option(
                "--chunk", type=click.IntRange(1), default=8192, show_default=True, help="Tokens of a chunk."
            ),
            click.option(
                "--quantum",
                type=click.IntRange(1),
                default=64,
                show_default=True,
                help="Tokens that are decoded between two looks at the queue.",
            ),
            click.option(
                "--token-seconds", type=float, default=0.02, show_default=True, help="Of a decode step."
            ),
            click.option(
                "--prefill-rate", type=float, default=20_000.0, show_default=True, help="Tokens a second."
            ),
        )
    ):
        function = option(function)
    return function


@click.command("simulate", epilog=_EPILOG)
@model_options
@click.option(
    "--memory", type=_sizes, required=True, metavar="SIZE,…", help="Memory for the cache on one rank."
)
@click.option(
    "--strategy", type=_names, default="optimal", show_default=True, metavar="NAME,…", help="How to group."
)
@click.option(
    "--block-size", type=parse_numbers, default="16", show_default=True, metavar="N,…", help="Tokens."
)
@click.option(
    "--eviction", type=_names, default="lru", show_default=True, metavar="NAME,…", help="Eviction policy."
)
@_stream_options
@_engine_options
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes for a sweep.")
@click.option(
    "--ray", metavar="ADDRESS", help="Run a sweep on a Ray cluster: auto, local, or ray://host:port."
)
@click.option("--html", type=new_file, metavar="FILE", help="Also write a report as HTML.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def command(
    config: Path, jobs: int, ray: str | None, html: Path | None, as_json: bool, **options: Any
) -> None:
    """Simulate requests in a model's KV cache: how many fit, what the pool holds, and how often prefixes are found.

    CONFIG is a Hugging Face config.json, or a folder that holds one. Options that take several values, with commas
    between, are swept: every combination is simulated. The same seed gives the same requests and the same results.
    """
    from kvframe.simulate import run_cases

    # imported before any work, since its library may be missing
    write_html = import_module("kvframe.cli.simulate_html").report_html if html else None
    stream = _stream(options)
    cases = list(_cases(config, options, stream))
    requests = len(stream.arrivals())
    with _progress(len(cases), requests, alone=ray is None and (jobs == 1 or len(cases) == 1)) as (
        done,
        step,
    ):
        results = run_cases(cases, jobs=jobs, ray=ray, done=done, step=step)
    _print(config, results, as_json, options)
    if html and write_html:
        try:
            html.write_text(write_html(config, results), encoding="utf-8")
        except OSError as error:
            raise click.FileError(str(html), error.strerror or "cannot be written") from error
        click.echo(f"wrote {html}", err=True)


def _stream(options: dict[str, Any]) -> RandomStream | RecordedStream:
    """The requests that the options ask for.

    Raises:
        UsageError: options of a random stream beside a recorded one, or a document's without documents.
        StreamError: the file or a length cannot be read.
    """
    from kvframe.simulate import RandomStream, parse_lengths, read_stream

    if options["stream_file"] is not None:
        given = [f"--{name}" for name in _RANDOM if options[name] is not None]
        if given:
            rule = f"is a stream of its own: leave {', '.join(given)} out"
            raise UsageError(option="--stream", value=str(options["stream_file"]), rule=rule)
        return read_stream(options["stream_file"], options["requests"])
    documents = options["documents"]
    for name in ("document", "skew"):
        if documents is None and options[name] is not None:
            raise UsageError(option=f"--{name}", value=options[name], rule="goes with --documents")
    return RandomStream(
        requests=options["requests"] or 1000,
        prompt=parse_lengths(options["prompt"] or "16-1024"),
        output=parse_lengths(options["output"] or "16-512"),
        rate=options["rate"],
        documents=documents or 0,
        document=parse_lengths(options["document"] or "512-4096") if documents else None,
        skew=1.0 if options["skew"] is None else options["skew"],
        seed=options["seed"],
    )


def _cases(path: Path, options: dict[str, Any], stream: RandomStream | RecordedStream) -> Iterator[Case]:
    """Every combination of the swept options."""
    from kvframe.cli.request import PlanRequest
    from kvframe.simulate import Case, Pace

    host = load_plugins()
    pace = Pace(**{name: options[name] for name in ("token_seconds", "prefill_rate", "quantum", "chunk")})
    for block in options["block_size"]:
        asked = PlanRequest.read(path, host, _plan_options(options, block), {})
        for memory, strategy, eviction in product(
            options["memory"], options["strategy"], options["eviction"]
        ):
            yield Case(
                name={"memory": memory, "block_size": block, "strategy": strategy, "eviction": eviction},
                specs=asked.model.specs,
                engine=asked.engine,
                memory=memory,
                stream=stream,
                strategy=strategy,
                layout=options["layout"],
                kinds=asked.model.kinds,
                pace=pace,
                eviction=eviction,
                max_requests=options["max_requests"],
                retention_interval=options["retention_interval"],
                watermark=options["watermark"],
            )


def _plan_options(options: dict[str, Any], block: int) -> dict[str, Any]:
    """What `kvframe plan` would be told; a chunk of a prompt is in flight."""
    taken = ("max_model_len", "no_prefix_caching", "cache_dtype", "state_dtype", "tensor_parallel_size")
    return {
        **{name: options[name] for name in taken},
        "block_size": block,
        "attention_tp": None,
        "dcp": 1,
        "in_flight_tokens": 1,
        "max_num_seqs": None,
        "scales_in_checkpoint": "unknown",
        "scale_policy": "unit",
    }


@contextmanager
def _progress(
    cases: int, requests: int, *, alone: bool
) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A progress bar on a terminal: of cases, and of the running case's requests where one runs at a time."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        every = bar.add_task("cases", total=cases, visible=cases > 1)
        one = bar.add_task("requests", total=requests, visible=alone)
        yield (
            lambda count: bar.update(every, completed=count),
            lambda count: bar.update(one, completed=count),
        )


def _print(config: Path, results: list[Result], as_json: bool, options: dict[str, Any]) -> None:
    if as_json:
        values = {
            "model": str(config),
            "seed": options["seed"],
            "results": [result.as_dict() for result in results],
        }
        click.echo(json.dumps(values, indent=2))
        return
    from kvframe.cli.simulate_show import show

    show(config, results)
