"""Answers in tags, and how they are compared with the gold answer: as text or as numbers."""

import math
import re
from collections.abc import Callable
from decimal import Decimal

Comparison = Callable[[str, str], float]

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# Longer answers are wrong: no gold answer has this many characters, and parsing must stay quick.
MAX_ANSWER_CHARACTERS = 1000
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,100})(?:\.[0-9]{1,100})?")


def parse_answer(completion: str) -> str | None:
    """The text in the last answer tags, or None. A completion without tags has no answer."""
    # Cut after the last closing tag: the pattern would search from each unclosed tag to the end, in quadratic time.
    closed, tag, _ = completion.rpartition("</answer>")
    answers = _ANSWER.findall(closed + tag)
    return answers[-1].strip() if answers else None


def accuracy(compare: Comparison) -> Comparison:
    """(completion, gold) -> 1 for a correct answer in answer tags, else 0."""

    def judge(completion: str, gold: str) -> float:
        answer = parse_answer(completion)
        if answer is None or len(answer) > MAX_ANSWER_CHARACTERS:
            answer = ""  # still compared, so that an unparsable gold answer gives NaN
        return compare(answer, gold)

    return judge


def equal_text(answer: str, gold: str) -> float:
    """1.0 if the texts are equal, apart from surrounding white space, else 0.0."""
    return float(answer.strip() == gold.strip())


def equal_number(answer: str, gold: str) -> float:
    """1.0 if the answer is one number, equal to the gold answer, else 0.0; NaN if the gold answer is not a number."""
    expected = _parse_number(gold)
    if expected is None:
        return math.nan
    return float(_parse_number(answer) == expected)


def _parse_number(text: str) -> Decimal | None:
    cleaned = text.strip().removeprefix("$").removesuffix(".")
    # Decimal, not float: long numbers would be rounded to their neighbours, and the longest ones to infinity.
    return Decimal(cleaned.replace(",", "")) if _NUMBER.fullmatch(cleaned) else None
