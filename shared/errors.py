"""The error for invalid input of the user, and text that is safe to print in errors."""

import json


class UserError(ValueError):
    """A setting, a model or data that cannot be used. The message names it and what would be valid.

    Commands print it without a traceback, because the code is not at fault.
    """


def printable(text: str, keep: str = "") -> str:
    """Escapes control characters, which another program's or a model's text must not send to a terminal.

    keep: those to leave as they are.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def printable_json(text: str) -> str:
    """JSON with the same meaning, in which control characters that JSON allows in strings are escaped, too."""
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
