"""The README tells the truth: its code runs, and its output is what the commands print."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest

import kvframe
from kvframe.cli import main

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.S)


def shown() -> list[tuple[str, str]]:
    """The commands that the README shows with their output, indented by four."""
    found = []
    for match in re.finditer(r"^    \$ (kvframe .*?)\n((?:    .*\n|\n)*)", TEXT, flags=re.M):
        output = "\n".join(line.removeprefix("    ") for line in match[2].splitlines())
        found.append((match[1], output))
    return found


def squeezed(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(("command", "output"), [pair for pair in shown() if "#" not in pair[0]])
def test_shown_output_is_what_the_command_prints(
    command: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as left:
        main(command.split()[1:])
    assert left.value.code == 0
    assert squeezed(capsys.readouterr().out) == squeezed(output)


def test_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks("python")[0], {})
    assert "layers.0.attn" in capsys.readouterr().out


def test_plugin_example_is_a_plugin_of_at_most_35_lines_that_plans() -> None:
    source = blocks("python")[1]
    assert len(source.splitlines()) <= 35
    module: Any = types.ModuleType("kvframe_prompt_window")
    exec(source, module.__dict__)
    host = kvframe.load_plugins(extra=[module])
    assert "prompt_window" in host.families
    spec = module.PromptWindowSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16", window=256)
    full = kvframe.FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    made = kvframe.plan(
        {"layers.0.attn": spec, "layers.1.attn": full},
        engine=kvframe.EngineConfig(max_model_len=4096),
        memory=1 << 30,
        host=host,
    )
    assert len(made.config.groups) == 2
