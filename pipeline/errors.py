"""What can go wrong, and the exit code that each outcome gives. Leaves out how errors are printed (cli.py)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """The only list of exit codes. `worst` picks one when several hold."""

    PASSED = 0
    INTERNAL = 1
    USER = 2
    QUALITY = 3
    SPEED = 4
    INCONCLUSIVE = 5
    CONFORMANCE = 6

    @staticmethod
    def worst(codes: Iterable[ExitCode]) -> ExitCode:
        """The code that a run with all these outcomes exits with: 6, 3, 4, 5, then 0."""
        found = set(codes)
        for code in (ExitCode.CONFORMANCE, ExitCode.QUALITY, ExitCode.SPEED, ExitCode.INCONCLUSIVE):
            if code in found:
                return code
        return ExitCode.PASSED


class UserError(Exception):
    """Something the user can change. The message is one line: what, where, and what is allowed."""

    exit_code = ExitCode.USER


class SeveralErrors(UserError):
    """More than one thing that the user can change, one line each."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = tuple(lines)
        super().__init__("; ".join(self.lines))


class MissingExtra(UserError):
    """An optional library is not installed."""

    def __init__(self, library: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {library}: pip install 'strop[{extra}]'")


class ConformanceError(Exception):
    """An artifact is not what the recipe says. One line, like UserError, but exit code 6."""

    exit_code = ExitCode.CONFORMANCE


def did_you_mean(name: str, allowed: Iterable[str], limit: int = 12) -> str:
    """End of an error line about an unknown name: a suggestion where one is close, and what is allowed.

    Args:
        name: What the user wrote.
        allowed: What would have been accepted.
        limit: How many of `allowed` are printed at most.
    """
    names = sorted(allowed)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    shown = ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
    return f"{hint}allowed: {shown or 'none'}"
