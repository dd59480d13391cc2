"""Compares answers as mathematics. This is the only file that uses math-verify and mathruler.

Some short texts make math-verify loop forever, in places that its own time limit does not cover. It also sets signals,
which works only in a main thread. mathruler, which EasyR1 uses, has no time limit and lets sympy evaluate the answer.
So rewards that use either of them run in the sandbox.
"""

import logging
import math
import re
import unicodedata
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from shared.errors import UserError

# Characters that occur in formulas but not in prose.
_FORMULA = re.compile(r"[\\^{}_()\[\]+*/=<>|]")
_PERCENT = re.compile(r"\\?%")
_LATEX_MARKS = ("$", r"\(", r"\[", r"\boxed")
# Limit for an answer without delimiters: the grammar takes seconds to parse long nonsense.
_MAX_BARE_CHARACTERS = 100
# Time limit of one parse or one comparison.
_SECONDS = 1
# math-verify compares floats to six decimals, and takes exact values below 1e-15, even as parts of a value, for 0.
_DECIMALS = 6
_ZERO_DIGITS = 15
# Exact values are compared down to 1e-1000; floats to at least three significant digits, or, within an expression, to
# twelve, which rounding errors do not reach.
_EXACT_ZERO_DIGITS = 1000
_SIGNIFICANT_DIGITS = 3
_UNROUNDED_DIGITS = 12


def _fraction(sign: re.Match[str]) -> str:
    return r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign[0]).split("\u2044"))


# Notations that math-verify silently misreads, and what we replace them with. It finds nothing in `\$5`, `**5**` and
# full-width digits, reads `1 000` as 0, `7 3/4` as (7 + 3)/4 and `1e3` as 3e, and of `2√3`, `2 sqrt(3)`, `2·3`, `2½`,
# `2²` and `2\mathrm{i}` only the 2.
_REWRITINGS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile("[\uff01-\uff5e]"), lambda wide: unicodedata.normalize("NFKC", wide[0])),
    # Markdown around a text, but not `*` as a product.
    (re.compile(r"(?<![\w)\]}*`])(\*{1,3}|`{1,3})(?=\S)([^*`\n]+)(?<=\S)\1(?![\w(\[{*`])"), r"\2"),
    (
        re.compile(r"([a-zA-Z]?)\\(?:mathrm|operatorname|mathsf|text)\s*\{\s*([ei])\s*\}(?=([a-zA-Z]?))"),
        lambda constant: f"{constant[1]}{constant[1] and ' '}{constant[2]}{constant[3] and ' '}",
    ),
    (re.compile(r"(?<![\w.\\])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]+)(?!\w)"), r"\1\\cdot 10^{\2}"),
    (re.compile("[\u00bc-\u00be\u2150-\u215e]"), _fraction),
    (
        # Powers of a number, a bracket or a variable; those of units (`5 cm²`, `5 m²`) are left to math-verify.
        re.compile(r"(?:(?<=[0-9)\]}])|(?<=(?<![a-zA-Z])[a-ln-zA-Z]))[\u00b2\u00b3\u00b9\u2070\u2074-\u207b]+"),
        lambda power: f"^{{{unicodedata.normalize('NFKC', power[0]).replace(chr(0x2212), '-')}}}",
    ),
    (re.compile("\u221e"), r"\\infty "),
    (re.compile(r"\\varnothing(?![a-zA-Z])|\u2205"), r"\\emptyset "),
    (re.compile(r"(?<=[\u4e00-\u9fff]):?(?=[-+0-9$\\])"), " "),
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
# Two letters or more, not after a digit as in `2xy`. Not `and` and `or`, which also occur in lists of formulas.
_WORD = re.compile(rf"(?<!\w)(?!(?:and|or)\b){_LETTER}{{2,}}", re.IGNORECASE)
# Otherwise 2024-01-02 would be the difference 2021.
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_PROSE = re.compile(rf"(?:{_LETTER}|[\s.,;:'\"\u2019!?&()])+")
# LaTeX commands and delimiters that may surround words.
_WRAPPING = re.compile(r"\\(?:boxed|text(?:bf|it|rm)?|math(?:bf|it|rm)|mbox|operatorname)(?![a-zA-Z])|\\[()\[\]]|[{}$]")
# A number and a unit of three letters or more: `18 dollars`. math-verify knows shorter units; `3 xy` has none.
_AMOUNT = re.compile(rf"\s*[-+]?[0-9][0-9.,]*\s+(?!(?:and|or)\b){_LETTER}{{3,}}(?:{_LETTER}|[\s.'\u2019])*")


def equal_math(answer: str, gold: str) -> float:
    """1 if math-verify finds the answer equal to the gold answer, else 0; NaN if it cannot parse the gold answer."""
    expected = read_gold(gold)
    if not expected:
        return math.nan
    return float(agree(expected, _read_answer(answer)))


def read_gold(text: str) -> list[Any]:
    """The expressions that math-verify finds in a gold answer, and their text; an empty list if there are none.

    For words only their text: as a formula they are products of letters, and `listen` would equal `silent`.
    """
    text = _rewritten(text)
    if words := words_of(text):
        return [words]
    read = _parse(text) if _AMOUNT.fullmatch(text) else _parse_formula(text)
    if not _has_expression(read):
        read = _parse(text) or read
    # A gold answer without an expression is compared as text if it has letters; signs without letters cannot be judged.
    return read if _has_expression(read) or any(map(str.isalpha, text)) else []


def read_number(text: str) -> list[Any]:
    """The expressions in a number that is written without LaTeX, such as `1/2`."""
    return _parse(text, extraction_config=[library().ExprExtractionConfig()])


def read_first(text: str) -> list[Any]:
    """The first expression that math-verify finds in a text, with its own settings and none of our rewritings."""
    return _parse(text, extraction_mode="first_match")


def read_latex(text: str) -> list[Any]:
    """The formula in LaTeX that is boxed, else one that is called the answer. Malformed LaTeX is not repaired.

    The settings are Open-R1's, but for `equations`, which this version of the library reads anyway.
    """
    normal = library().parser.NormalizationConfig(units=True, nits=False, malformed_operators=False, boxed="all")
    return _parse(text, extraction_config=[_boxed_first(normalization_config=normal)], extraction_mode="first_match")


def read_solution(text: str) -> list[Any]:
    """The expressions in a whole solution: a boxed formula, else one called the answer, else a bare number."""
    kinds = [_boxed_first(), library().ExprExtractionConfig()]
    read = _parse(_rewritten(text), extraction_config=kinds, extraction_mode="first_match")
    return read + [words for part in read if isinstance(part, str) and (words := words_of(part))]


def same(expected: list[Any], given: list[Any]) -> bool:
    """Whether any given expression equals any expected one."""
    return library().verify(expected, given, timeout_seconds=_SECONDS)


def agree(expected: list[Any], given: list[Any]) -> bool:
    """The same function, except that not all very small values are equal."""
    from sympy import Float  # slow to import, like math-verify, which needs it

    parts = [part for part in (*expected, *given) if not isinstance(part, str)]
    if not any(part.has(Float) for part in parts):
        return library().verify(expected, given, numeric_precision=_EXACT_ZERO_DIGITS, timeout_seconds=_SECONDS)
    zeros = max(map(_leading_zeros, expected))
    decimals = max(_DECIMALS, zeros + _SIGNIFICANT_DIGITS)
    digits = max(_ZERO_DIGITS, zeros + _UNROUNDED_DIGITS)
    return library().verify(
        expected, given, float_rounding=decimals, numeric_precision=digits, timeout_seconds=_SECONDS
    )


def _leading_zeros(part: Any) -> int:
    """The zeros between the point and the first digit of a number: 2 of 0.005. 0 for what is no small number: texts and
    matrices have no `is_number`."""
    is_finite_number = getattr(part, "is_number", False) and part.is_finite
    size = abs(complex(part)) if is_finite_number else 0.0
    return math.floor(-math.log10(size)) if 0 < size < 1 else 0


@cache
def library() -> Any:
    """math-verify, imported and warmed up.

    The import and the first parse, which builds a grammar, are slow. Call this before judging, so that they do not
    count towards the time limit of a completion.
    """
    import math_verify

    # Its warnings about slow texts print the whole text.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    math_verify.parse("$1$", parsing_timeout=60)
    return math_verify


def graded(answer: str, gold: str) -> float:
    """1 if mathruler accepts the answer, else 0; NaN without a gold answer."""
    if not gold:
        return math.nan
    accepts = grader().grade_answer
    try:
        with warnings.catch_warnings(action="ignore"):  # Python's, about the answer that sympy evaluates
            return float(accepts(answer, gold))
    except Exception:  # an answer that makes it fail, such as one that takes all memory, is a wrong one
        return 0.0


def boxed(text: str) -> str:
    r"""The content of the last \boxed{…}, stripped; the text `None` if there is none or its brace is not closed."""
    return grader().extract_boxed_content(text)


@cache
def grader() -> Any:
    """mathruler's grader. Raises UserError if it, or a package that it imports, is not installed."""
    try:
        from mathruler import grader
    except ModuleNotFoundError as error:
        raise UserError(
            f"rewards: easyr1/math and easyr1/r1v need {error.name}, which is not installed",
            "pip install 'tandem-grpo[vision]'",
        ) from error
    logging.getLogger("pylatexenc").setLevel(logging.ERROR)  # it warns of malformed LaTeX
    return grader


def _read_answer(text: str) -> list[Any]:
    """All readings of an answer: it is correct if any of them is.

    An answer that looks like a formula is read only as a formula, not as prose with a number at its end.
    """
    text = _rewritten(text)
    words = words_of(text)
    if words and _DATE.fullmatch(words):
        return [words]
    if _is_marked(text) or len(text) > _MAX_BARE_CHARACTERS:
        read = _parse(text)
    else:
        read = _parse_formula(text)
        if not _FORMULA.search(text) and (_WORD.search(text) or not _has_expression(read)):
            read = read + _parse(text)
    return [*read, words] if words else read


def _parse(text: str, **settings: Any) -> list[Any]:
    """The expressions in a text. The last element is the text of the first expression, as math-verify extracts it."""
    return library().parse(text, parsing_timeout=_SECONDS, **settings)


def _parse_formula(text: str) -> list[Any]:
    r"""The expressions in a formula, put between `$`: of a bare `2\sqrt{3}` or `1, 2` math-verify reads one number."""
    read = _parse(as_latex(text))
    # 12.5 may also mean `12.5%`; math-verify accepts this only for whole numbers.
    return read + _parse(as_latex(_PERCENT.sub("", text))) if "%" in text else read


def _boxed_first(**settings: Any) -> Any:
    return library().LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False, **settings)


def _has_expression(read: list[Any]) -> bool:
    return any(not isinstance(part, str) for part in read)


def _rewritten(text: str) -> str:
    for pattern, replacement in _REWRITINGS:
        text = pattern.sub(replacement, text)
    return text


def _is_marked(text: str) -> bool:
    return any(mark in text for mark in _LATEX_MARKS)


def as_latex(text: str) -> str:
    """The text with the delimiters of a formula, if it has none."""
    return text if _is_marked(text) else f"${' '.join(text.split()).removesuffix('.')}$"


def words_of(text: str) -> str | None:
    r"""`\text{No  solution.}` -> `no solution`; None if the text has more than words.

    A single letter is not a word; a date is.
    """
    bare = _WRAPPING.sub("", text)
    if _DATE.fullmatch(bare.strip()):
        return bare.strip()
    if not _PROSE.fullmatch(bare) or not _WORD.search(bare):
        return None
    return " ".join(bare.split()).strip(" .").casefold()
