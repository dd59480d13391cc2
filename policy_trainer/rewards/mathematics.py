"""Answers compared as mathematics, by math-verify: the only file that knows it.

Some short texts keep it busy for ever, in places that its own time limit does not reach, and it sets signals, which
works in a main thread alone: rewards that use it are judged apart.
"""

import logging
import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

# What stands in formulas and not in prose.
_FORMULA = re.compile(r"[\\^{}_()\[\]+*/=<>|]")
_PERCENT = re.compile(r"\\?%")
_LATEX_MARKS = ("$", r"\(", r"\[", r"\boxed")
# Of an answer without delimiters: the grammar takes seconds over long nonsense.
_MAX_BARE_CHARACTERS = 100
# Of one parse or one comparison.
_SECONDS = 1
# What math-verify reads wrongly without telling, and how it reads it rightly: of `\$5` nothing, `1 000` as 0,
# `7 3/4` as (7 + 3)/4, of `2√3`, `2 sqrt(3)` and `2·3` the 2 alone.
_REWRITINGS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\\$"), ""),
    (
        re.compile(r"(?<![0-9.])[1-9][0-9]{0,2}(?:(?:\s|~|\\[,;: ])[0-9]{3})+(?![0-9])"),
        lambda thousands: re.sub(r"[^0-9]", "", thousands[0]),
    ),
    (re.compile(r"(?<![0-9.,/])([0-9]+)\s+([0-9]+)/([0-9]+)(?![0-9./])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?:√|(?<![\\a-zA-Z])sqrt)\s*([0-9.]+|[^\W\d_]|\([^()]*\))"), r"\\sqrt{\1}"),
    (re.compile("·"), r"\\cdot "),
)
_LETTER = r"[^\W\d_]"
# Of two letters or more, not behind a digit as in `2xy`. A list of formulas has `and` and `or` too.
_WORD = re.compile(rf"(?<!\w)(?!(?:and|or)\b){_LETTER}{{2,}}", re.IGNORECASE)
_PROSE = re.compile(rf"(?:{_LETTER}|[\s.,;:'\"\u2019!?&()])+")
# LaTeX in which words may stand.
_WRAPPING = re.compile(r"\\(?:boxed|text(?:bf|it|rm)?|math(?:bf|it|rm)|mbox|operatorname)(?![a-zA-Z])|\\[()\[\]]|[{}$]")
# Shorter units, such as cm, are known to math-verify, and `3 xy` has none.
_AMOUNT = re.compile(rf"\s*[-+]?[0-9][0-9.,]*\s+(?!(?:and|or)\b){_LETTER}{{3,}}(?:{_LETTER}|[\s.'\u2019])*")


def equal_math(answer: str, gold: str) -> float:
    """1.0 when math-verify finds the answer equal; NaN when it cannot parse the gold answer."""
    expected = read_gold(gold)
    if not expected:
        return math.nan
    return float(same(expected, _read_answer(answer)))


def read_gold(text: str) -> list[Any]:
    """The expressions that math-verify finds in a gold answer, and their text; none is an empty list.

    Of words their text alone: as a formula they are products of letters, and `listen` would equal `silent`.
    """
    if words := words_of(text):
        return [words]
    text = _rewritten(text)
    read = _parse(text) if is_amount(text) else _parse_formula(text)
    if not _found(read):
        read = _parse(text) or read
    # What has no expression is compared as text; signs alone are neither.
    return read if _found(read) or any(map(str.isalpha, text)) else []


def read_number(text: str) -> list[Any]:
    """The same of a number that is written without LaTeX, such as `1/2`."""
    return _parse(text, extraction_config=[library().ExprExtractionConfig()])


def read_solution(text: str) -> list[Any]:
    """The same of a whole solution: the boxed formula, else another in LaTeX, as Open-R1 has it; else a bare number."""
    latex = library().LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    kinds = [latex, library().ExprExtractionConfig()]
    read = _parse(_rewritten(text), extraction_config=kinds, extraction_mode="first_match")
    return read + [words for part in read if isinstance(part, str) and (words := words_of(part))]


def same(expected: list[Any], given: list[Any]) -> bool:
    """Whether any of the given equals any of the expected."""
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


def _read_answer(text: str) -> list[Any]:
    """What an answer may mean: it is right when any of it is. A formula is no prose with a number at its end."""
    words = words_of(text)
    text = _rewritten(text)
    if _is_marked(text) or len(text) > _MAX_BARE_CHARACTERS:
        read = _parse(text)
    else:
        read = _parse_formula(text)
        if not _FORMULA.search(text) and (has_words(text) or not _found(read)):
            read = read + _parse(text)
    return [*read, words] if words else read


def _parse(text: str, **settings: Any) -> list[Any]:
    """Expressions and, last, the text of the first of them as math-verify has it."""
    return library().parse(text, parsing_timeout=_SECONDS, **settings)


def _parse_formula(text: str) -> list[Any]:
    r"""math-verify reads LaTeX between delimiters only: of a bare `2\sqrt{3}` or `1, 2` it would take one number."""
    read = _parse(_as_latex(text))
    # `12.5%` may also be written as 12.5, which math-verify knows of whole numbers alone.
    return read + _parse(_as_latex(_PERCENT.sub("", text))) if "%" in text else read


def _found(read: list[Any]) -> bool:
    return any(not isinstance(part, str) for part in read)


def _rewritten(text: str) -> str:
    for pattern, replacement in _REWRITINGS:
        text = pattern.sub(replacement, text)
    return text


def _is_marked(text: str) -> bool:
    return any(mark in text for mark in _LATEX_MARKS)


def _as_latex(text: str) -> str:
    return text if _is_marked(text) else f"${' '.join(text.split()).removesuffix('.')}$"


def has_words(text: str) -> bool:
    return _WORD.search(text) is not None


def words_of(text: str) -> str | None:
    r"""`\text{No  solution.}` -> `no solution`; None for what holds other than words. A single letter is no word."""
    bare = _WRAPPING.sub("", text)
    if not _PROSE.fullmatch(bare) or not has_words(bare):
        return None
    return " ".join(bare.split()).strip(" .").casefold()


def is_amount(text: str) -> bool:
    """Whether it is a number and its unit in words: `18 dollars`."""
    return _AMOUNT.fullmatch(text) is not None
