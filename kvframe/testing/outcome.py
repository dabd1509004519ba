"""What a check finds: nothing, a fault, or that it does not apply."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import attrs

from kvframe.errors import KVFrameError

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
S = TypeVar("S")


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class ConformanceError(KVFrameError, AssertionError):
    """A family or plugin breaks the law that a check tests.

    Args:
        subject: what was tested, such as the repr of an example.
        found: what it did.
    """

    kind: ClassVar[str] = "conformance"
    subject: str
    found: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.found}."


@attrs.frozen
class NotApplicable:
    """A check's answer where its law says nothing about the subject."""

    reason: str


@attrs.frozen
class Check(Generic[S]):
    """One named law. Its function's docstring says the law, why it matters, and what to do where it is broken."""

    function: Callable[[S], NotApplicable | None]

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def explanation(self) -> str:
        """The function's docstring."""
        return inspect.getdoc(self.function) or ""

    @property
    def law(self) -> str:
        """The docstring's first line."""
        return self.explanation.partition("\n")[0]


@attrs.frozen(kw_only=True)
class Outcome:
    """What one check found about one subject.

    Args:
        check: the check's name.
        subject: the family or plugin.
        status: "passed", "failed" or "skipped".
        message: what was found, or why the check does not apply; empty when passed.
        explanation: the law, why it matters, and what to do.
    """

    check: str
    subject: str
    status: str
    message: str = ""
    explanation: str = ""


def run(check: Check[S], subject: S) -> Outcome:
    """Run one check. Whatever the plugin raises is a failure of the check, never an error of the run."""
    made: dict[str, Any] = {"check": check.name, "subject": str(subject), "explanation": check.explanation}
    try:
        answer = check.function(subject)
    except ConformanceError as fault:
        return Outcome(status=FAILED, message=str(fault), **made)
    except (Exception, SystemExit) as error:  # a plugin's code: it may raise anything
        return Outcome(status=FAILED, message=f"raised {type(error).__name__}: {error}", **made)
    if answer is not None:
        return Outcome(status=SKIPPED, message=answer.reason, **made)
    return Outcome(status=PASSED, **made)


def expect(holds: object, subject: object, found: str) -> None:
    """Go on if `holds`.

    Raises:
        ConformanceError: it does not; `found` says what there is instead.
    """
    if not holds:
        raise ConformanceError(subject=subject if isinstance(subject, str) else repr(subject), found=found)
