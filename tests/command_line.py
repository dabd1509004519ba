"""The real command line, in this process."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvframe.cli import main


@attrs.frozen
class Answer:
    """What a command left behind."""

    code: int
    out: str
    err: str


def kvframe(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Answer:
    """Run `kvframe …`; always ends with an exit code."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    code = left.value.code
    return Answer(int(code or 0), *capsys.readouterr())
