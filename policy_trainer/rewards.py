"""Reward functions: pure, of a completion's text and the gold answer.

What the completion causes gets the failing score; NaN only says that the gold answer cannot be judged.
"""

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cache
from typing import Any

from shared.refusal import Refused

Reward = Callable[[str, str], float]
Comparison = Callable[[str, str], float]

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SEAM = re.compile(r"</think>\s*<answer>")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,100})(?:\.[0-9]{1,100})?")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# Longer answers are wrong: nothing that is asked for has so many characters, and parsing must stay quick.
MAX_ANSWER_CHARACTERS = 1000
# Of a formula without delimiters: the grammar takes seconds over long nonsense.
_MAX_BARE_CHARACTERS = 100
# What stands in formulas and neither in words nor in numbers.
_FORMULA = re.compile(r"[\\^{}_()\[\]+*/=]")
_LATEX_MARKS = ("$", r"\(", r"\[", r"\boxed")
# Of one parse or one comparison by math-verify, which some short answers would keep busy for ever.
_MATH_SECONDS = 1


def parse_answer(completion: str) -> str | None:
    """The text in the last answer tags, or None. A completion without tags has no answer."""
    # Without what follows the last closing tag: unclosed tags would each be searched to the end, in quadratic time.
    closed, tag, _ = completion.rpartition("</answer>")
    answers = _ANSWER.findall(closed + tag)
    return answers[-1].strip() if answers else None


def equal_text(answer: str, gold: str) -> float:
    """1.0 when the texts are equal but for surrounding white space."""
    return float(answer.strip() == gold.strip())


def equal_number(answer: str, gold: str) -> float:
    """1.0 when the answer is one number of the gold answer's value; NaN when the gold answer is no number."""
    expected = _parse_number(gold)
    if expected is None:
        return math.nan
    return float(_parse_number(answer) == expected)


def equal_math(answer: str, gold: str) -> float:
    """1.0 when math-verify finds the answer equal; NaN when it cannot parse the gold answer."""
    parse, verify = _math_verify()
    expected = parse(_as_latex(gold), parsing_timeout=_MATH_SECONDS)
    if not expected:
        return math.nan
    given = parse(_as_latex(answer), parsing_timeout=_MATH_SECONDS)
    return float(verify(expected, given, timeout_seconds=_MATH_SECONDS))


@cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., bool]]:
    """math-verify's parse and verify. The import and the first parse, which builds a grammar, are slow: that must not
    count against an answer's time."""
    from math_verify import parse, verify

    parse("$1$", parsing_timeout=60)
    return parse, verify


def _as_latex(text: str) -> str:
    r"""math-verify reads LaTeX between delimiters only: of a bare `2\sqrt{3}` it would take the 2."""
    marked = any(mark in text for mark in _LATEX_MARKS)
    bare = not marked and len(text) <= _MAX_BARE_CHARACTERS and _FORMULA.search(text)
    return f"${text}$" if bare else text


COMPARISONS: Mapping[str, Comparison] = {"exact": equal_text, "number": equal_number, "math": equal_math}


def accuracy(compare: Comparison) -> Reward:
    """1 for a right answer in answer tags, else 0."""

    def reward(completion: str, gold: str) -> float:
        answer = parse_answer(completion)
        if answer is None or len(answer) > MAX_ANSWER_CHARACTERS:
            answer = ""  # compared all the same, so that an unparsable gold answer shows
        return compare(answer, gold)

    return reward


def format_reward(completion: str, gold: str) -> float:
    """1 for `<think>…</think> <answer>…</answer>` and nothing else but a last newline, else 0. Open-R1's format reward.

    It is `^<think>.*?</think>\\s*<answer>.*?</answer>$` (DOTALL) in linear time: the first seam leaves most room for
    the end, so that no other need be tried.
    """
    text = completion.removesuffix("\n")
    seam = _SEAM.search(text, len("<think>"))
    whole = text.startswith("<think>") and seam is not None and text.endswith("</answer>", seam.end())
    return float(whole)


def tags_reward(completion: str, gold: str) -> float:
    """1 for the think and answer blocks with each of the four tags exactly once, else 0.

    Counting only opening tags is exploited within twenty steps.
    """
    once = all(completion.count(tag) == 1 for tag in TAGS)
    return format_reward(completion, gold) if once else 0.0


def choose_rewards(names: list[str], compare: Comparison) -> dict[str, Reward]:
    """Reward functions by name; Refused for a name that is none, or stands twice."""
    known: dict[str, Reward] = {"accuracy": accuracy(compare), "format": format_reward, "tags": tags_reward}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise Refused(f"rewards: {unknown[0]!r} is none of {', '.join(known)}")
    twice = [name for name in names if names.count(name) > 1]
    if twice:  # its weight would be lost
        raise Refused(f"rewards: {twice[0]!r} stands twice")
    return {name: known[name] for name in names}


def _parse_number(text: str) -> Decimal | None:
    cleaned = text.strip().removeprefix("$").removesuffix(".")
    # Exactly: as floats, long numbers would equal their neighbours, and the longest ones each other.
    return Decimal(cleaned.replace(",", "")) if _NUMBER.fullmatch(cleaned) else None
