"""Errors that say what is wrong and what to do, and text that is safe to print in errors."""

import json
from textwrap import shorten

# Characters of an error that are shown inside another.
_BRIEF = 200


class ExpectedError(Exception):
    """An error that is not a bug in the code. Commands print it without a traceback.

    problem: what is wrong; it begins with the name of the setting, if there is one. remedy: what to do; empty if the
    problem says it already. It gets a line of its own if the problem has several lines.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return ("\n" if "\n" in self.problem else "; ").join(filter(None, (self.problem, self.remedy)))


class UserError(ExpectedError, ValueError):
    """A setting, a model or data that cannot be used. The problem names it, the remedy what would be valid."""


def brief(error: Exception) -> str:
    """The type of an error and the beginning of what it says: PyTorch's errors list all their kernels."""
    return f"{type(error).__name__}: {shorten(str(error), _BRIEF, placeholder=' …')}"


def printable(text: str, keep: str = "") -> str:
    """Escapes control characters, which another program's or a model's text must not send to a terminal.

    keep: those to leave as they are.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def printable_json(text: str) -> str:
    """JSON with the same meaning, in which control characters that JSON allows in strings are escaped, too."""
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
