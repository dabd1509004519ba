"""The HTML report: one file, the numbers of `--json`, nothing from outside, and nothing that a browser complains of."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvframe.cli import main
from kvframe.cli.options import size_text
from kvframe.cli.plot import SweepPoint, nice_steps, sweep_svg
from tests.command_line import kvframe
from tests.model_configs import LLAMA

jinja2 = pytest.importorskip("jinja2")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--v=0"),
)
VOID = {"meta", "link", "br", "rect", "circle", "line", "polyline", "path"}
MIXED = {
    **LLAMA,
    "model_type": "gemma3_text",
    "num_hidden_layers": 8,
    "head_dim": 128,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
}
OPTIONS = ("--memory", "1GiB", "--max-model-len", "8192", "--in-flight-tokens", "256")


@attrs.frozen
class Report:
    """One run of `kvframe plan --html`."""

    html: str
    result: dict[str, Any]
    config: Path
    messages: str


def run(*arguments: Any) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return int(left.value.code or 0), out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    # a name that would be markup if it were not escaped
    folder = tmp_path_factory.mktemp("report") / "<b>model & co"
    folder.mkdir()
    config, target = folder / "config.json", folder / "report.html"
    config.write_text(json.dumps(MIXED), encoding="utf-8")
    code, out, err = run("plan", config, *OPTIONS, "--html", target, "--json")
    assert code == 0, err
    return Report(target.read_text(encoding="utf-8"), json.loads(out), config, err)


class Page(HTMLParser):
    """The elements of a page, the words of each tag's elements, and whether every tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[tuple[str, ...], str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append((tuple(self._open), data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def cells(self) -> Iterator[str]:
        for opened, words in self.words:
            if opened and opened[-1] in ("td", "th", "dd"):
                yield " ".join(words.split())


def test_nothing_comes_from_outside(report: Report) -> None:
    page = Page(report.html)
    addresses = [
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "action", "data", "srcset")
    ]
    assert addresses == ["data:,"]
    urls = set(re.findall(r"https?://[^\"'<\s]+", report.html))
    assert urls == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert set(re.findall(r"url\(([^)]+)\)", report.html)) <= {"#kv-empty", "#kv-padding"}
    assert not page.all("script")
    assert "default-src 'none'" in report.html


def test_it_is_accessible(report: Report) -> None:
    page = Page(report.html)
    assert page.all("html")[0]["lang"] == "en"
    assert [tag for tag, _ in page.elements if tag in ("h1", "h2")] == ["h1"] + ["h2"] * 7
    assert len(page.all("table")) == len(page.all("caption")) > 0
    assert all(heading.get("scope") in ("row", "col") for heading in page.all("th"))
    assert [(svg["role"], bool(svg["aria-label"])) for svg in page.all("svg")] == [("img", True)] * 2
    ids = [attributes["id"] for tag, attributes in page.elements if "id" in attributes and tag != "pattern"]
    assert len(ids) == len(set(ids))
    named = {
        attributes["aria-labelledby"] for _, attributes in page.elements if "aria-labelledby" in attributes
    }
    assert named <= set(ids)


def test_it_has_a_dark_and_a_printed_form(report: Report) -> None:
    assert "@media (prefers-color-scheme: dark)" in report.html
    assert "@media print" in report.html


def test_names_are_escaped(report: Report) -> None:
    assert "&lt;b&gt;model &amp; co" in report.html
    assert "<b>" not in report.html


def test_its_numbers_are_those_of_the_plan(report: Report) -> None:
    cells, result = list(Page(report.html).cells()), report.result
    for group in result["groups"]:
        for name in ("natural_page_bytes", "page_bytes", "stride_bytes", "blocks_per_request"):
            assert f"{group[name]:,}" in cells
        assert f"{group['reserve_blocks_per_request']:,}" in cells
    for cause in ("floor", "layer_padding", "page_padding", "slab_remainder"):
        assert f"{result['waste'][f'{cause}_bytes']:,}" in cells
    for other in result["alternatives"]:
        assert other["name"] in cells
        assert f"{other['cost']:.5f}" in cells
        assert all(size_text(held) in cells for held in other["held_bytes"].values())
    words = " ".join(report.html.split())
    assert (
        f"hold {result['max_concurrency']:,.2f} requests of 8,192 tokens at once: {result['tokens']:,} tokens"
        in words
    )
    assert "is what limits the number of requests" in words


def test_the_sweep_replans_at_sixteen_budgets_around_the_given_one(report: Report) -> None:
    rows = re.findall(
        r"<tr(?: class=\"chosen\")?><th scope=\"row\">([^<]+)</th>\s*<td>([^<]+)</td><td>([\d,]+)</td></tr>",
        report.html,
    )
    assert [memory for memory, _, _ in rows] == [size_text(step * (1 << 30) // 8) for step in range(1, 17)]
    given = rows[7]
    assert given[0] == "1.00 GiB"
    assert given[1] == f"{report.result['max_concurrency']:,.2f}"
    assert given[2] == f"{report.result['tokens']:,}"
    code, out, err = run("plan", report.config, "--memory", "1536MiB", *OPTIONS[2:], "--json")
    assert code == 0, err
    other = json.loads(out)
    assert rows[11] == ("1.50 GiB", f"{other['max_concurrency']:,.2f}", f"{other['tokens']:,}")
    assert len(Page(report.html).all("circle")) == 16


def test_the_inverse_questions_get_the_answers_of_the_command_line(report: Report) -> None:
    cells = list(Page(report.html).cells())
    for count in (1, 256):
        code, out, err = run("plan", report.config, *OPTIONS[2:], "--requests", count, "--json")
        assert code == 0, err
        assert f"{size_text(json.loads(out)['memory_bytes'])} for 8,192 tokens each" in cells
    (longest,) = (cell for cell in cells if cell.endswith("tokens in this plan's memory"))
    length = int(longest.split()[0].replace(",", ""))
    assert run("plan", report.config, "--memory", "1GiB", "--max-model-len", length, *OPTIONS[4:])[0] == 0


def test_progress_is_for_terminals(report: Report) -> None:
    assert report.messages == f"wrote {report.config.parent / 'report.html'}\n"


def test_pools_and_stages_are_shown_where_there_are_several(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MIXED), encoding="utf-8")
    target = tmp_path / "report.html"
    code, _, err = run("plan", config, *OPTIONS, "--pipeline-layers", "4,4", "--html", target)
    assert code == 0, err
    html = target.read_text(encoding="utf-8")
    Page(html)
    assert "Pipeline stages. The one with the fewest blocks decides" in html
    assert "Pipeline stage 0 of 2, which decides." in html


def test_without_jinja2_it_names_the_extra_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "kvframe.cli.html", raising=False)
    target = tmp_path / "report.html"
    answer = kvframe(capsys, "plan", tmp_path / "absent.json", "--memory", "1GiB", "--html", target, "--json")
    assert answer.code == 1
    error = json.loads(answer.out)["error"]
    assert error["kind"] == "missing_dependency"
    assert "pip install 'kvframe[report]'" in error["message"]
    assert not target.exists()


def test_the_plot_marks_budgets_in_which_nothing_fits() -> None:
    points = [
        SweepPoint(memory_bytes=1 << 30, requests=0.0, tokens=0),
        SweepPoint(memory_bytes=2 << 30, requests=1.5, tokens=1536),
    ]
    svg = sweep_svg(points, 2 << 30, 1024)
    assert svg.count('class="none"') == 1
    assert svg.count('class="dot"') == 1
    assert "2.00 GiB: 1.50 requests, 1,536 tokens" in svg
    assert "this plan: 2.00 GiB" in svg


@pytest.mark.parametrize(
    ("highest", "steps"),
    [
        (12.3, [0, 2, 4, 6, 8, 10, 12]),
        (128, [0, 20, 40, 60, 80, 100, 120]),
        (0.7, [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
        (3.4e6, [0, 5e5, 1e6, 1.5e6, 2e6, 2.5e6, 3e6]),
    ],
)
def test_axes_have_round_numbers(highest: float, steps: list[float]) -> None:
    assert nice_steps(highest) == pytest.approx(steps)


def console_of(html: str, folder: Path) -> tuple[str, list[str]]:
    """The page as Chromium sees it, and what it wrote to the console."""
    page = folder / "page.html"
    page.write_text(html, encoding="utf-8")
    done = subprocess.run(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian package chromium)")
def test_chromium_opens_it_without_console_errors(report: Report, tmp_path: Path) -> None:
    dom, console = console_of(report.html, tmp_path)
    assert console == []
    assert "Memory map</h2>" in dom
    assert dom.count("<circle") == 16


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian package chromium)")
def test_chromium_would_say_so_if_the_report_asked_for_anything_from_outside(
    report: Report, tmp_path: Path
) -> None:
    image = '<img src="http://127.0.0.1:9/pixel.png" alt="">'
    _, console = console_of(report.html.replace("<main>", f"<main>{image}"), tmp_path)
    assert any("Content Security Policy" in line for line in console)
