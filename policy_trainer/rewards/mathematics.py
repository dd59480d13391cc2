"""Answers compared as mathematics, by math-verify: the only file that knows it.

Some short texts keep it busy for ever, in places that its own time limit does not reach, and it sets signals, which
works in a main thread alone: rewards that use it are judged apart.
"""

import logging
import math
import re
from functools import cache
from typing import Any

# What stands in formulas and neither in words nor in numbers.
_FORMULA = re.compile(r"[\\^{}_()\[\]+*/=]")
_LATEX_MARKS = ("$", r"\(", r"\[", r"\boxed")
# Of a formula without delimiters: the grammar takes seconds over long nonsense.
_MAX_BARE_CHARACTERS = 100
# Of one parse or one comparison.
_SECONDS = 1


def equal_math(answer: str, gold: str) -> float:
    """1.0 when math-verify finds the answer equal; NaN when it cannot parse the gold answer."""
    expected = read_math(gold)
    if not expected:
        return math.nan
    return float(same(expected, read_math(answer)))


def read_math(text: str) -> list[Any]:
    """The expressions that math-verify finds in an answer, best first; none is an empty list."""
    return _parse(_as_latex(text))


def read_number(text: str) -> list[Any]:
    """The same of a number that is written without LaTeX, such as `1/2`."""
    return _parse(text, extraction_config=[library().ExprExtractionConfig()])


def read_solution(text: str) -> list[Any]:
    """The same of a whole solution: the boxed formula, else another in LaTeX, as Open-R1 has it; else a bare number."""
    latex = library().LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    kinds = [latex, library().ExprExtractionConfig()]
    return _parse(text, extraction_config=kinds, extraction_mode="first_match")


def same(expected: list[Any], given: list[Any]) -> bool:
    return library().verify(expected, given, timeout_seconds=_SECONDS)


@cache
def library() -> Any:
    """math-verify. The import and the first parse, which builds a grammar, are slow: that must not count against an
    answer's time, so whoever judges calls this first."""
    import math_verify

    # It warns of texts that take too long by printing them whole.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    math_verify.parse("$1$", parsing_timeout=60)
    return math_verify


def _parse(text: str, **settings: Any) -> list[Any]:
    return library().parse(text, parsing_timeout=_SECONDS, **settings)


def _as_latex(text: str) -> str:
    r"""math-verify reads LaTeX between delimiters only: of a bare `2\sqrt{3}` it would take the 2."""
    marked = any(mark in text for mark in _LATEX_MARKS)
    bare = not marked and len(text) <= _MAX_BARE_CHARACTERS and _FORMULA.search(text)
    return f"${text}$" if bare else text
