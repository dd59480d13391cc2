"""The error for invalid input of the user, and text that is safe to print in errors."""


class UserError(ValueError):
    """A setting, a model or data that cannot be used. The message names it and says what would be right.

    Commands print it without a traceback, because the code is not at fault.
    """


def printable(text: str) -> str:
    """The text with its control characters escaped: another program's text must not steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
