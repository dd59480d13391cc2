"""Evaluates arithmetic that a model wrote: exactly, with limits, and never by `eval`."""

import re
from fractions import Fraction

# This bounds the size of the numbers and the time of exact arithmetic.
MAX_CHARACTERS = 1000
# Nesting of brackets, which are evaluated by recursion. Python's parser allows 200.
MAX_DEPTH = 100

# Numbers as Python writes them: whole numbers have no leading zeros.
_TOKEN = re.compile(r"[ \t\f]*(?:(?P<number>\d+\.\d*|\.\d+|0+(?!\d)|[1-9]\d*)|(?P<sign>[-+*/()]))", re.ASCII)
_END = ""


class NoExpression(ValueError):
    """The text is not arithmetic, has no value, or exceeds the limits."""


def evaluate(text: str) -> Fraction:
    """The value of an expression of numbers, + - * / and brackets, with Python's precedence.

    Raises NoExpression for everything else: other operators such as `**` and `//`, a division by zero, a text that
    exceeds the limits.
    """
    if len(text) > MAX_CHARACTERS:
        raise NoExpression(f"has more than {MAX_CHARACTERS} characters")
    try:
        return _Reader(_tokens(text)).whole()
    except ZeroDivisionError:
        raise NoExpression("divides by zero") from None


def _tokens(text: str) -> list[str]:
    tokens, place, text = [], 0, text.rstrip(" \t\f")
    while place < len(text):
        match = _TOKEN.match(text, place)
        if not match:
            raise NoExpression(f"cannot be parsed at character {place}")
        tokens.append(match["number"] or match["sign"])
        place = match.end()
    return [*tokens, _END]


class _Reader:
    """Recursive descent: one method for each level of precedence. Each consumes as many tokens as it can."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0
        self._depth = 0

    def whole(self) -> Fraction:
        value = self._sum()
        self._expect(_END)
        return value

    def _sum(self) -> Fraction:
        value = self._product()
        while (sign := self._take("+", "-")) is not None:
            other = self._product()
            value = value + other if sign == "+" else value - other
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while (sign := self._take("*", "/")) is not None:
            other = self._signed()
            value = value * other if sign == "*" else value / other
        return value

    def _signed(self) -> Fraction:
        negative = False
        while (sign := self._take("+", "-")) is not None:
            negative ^= sign == "-"
        value = self._atom()
        return -value if negative else value

    def _atom(self) -> Fraction:
        if self._take("(") is None:
            return self._number()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NoExpression(f"has more than {MAX_DEPTH} nested brackets")
        value = self._sum()
        self._expect(")")
        self._depth -= 1
        return value

    def _number(self) -> Fraction:
        token = self._tokens[self._place]
        if token in ("", *"+-*/()"):
            raise NoExpression(f"has {token or 'its end'} where a number should be")
        self._place += 1
        return Fraction(token)

    def _take(self, *wanted: str) -> str | None:
        token = self._tokens[self._place]
        if token not in wanted:
            return None
        self._place += 1
        return token

    def _expect(self, wanted: str) -> None:
        if self._take(wanted) is None:
            raise NoExpression(f"has {self._tokens[self._place] or 'its end'} where {wanted or 'its end'} should be")
