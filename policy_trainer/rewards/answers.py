"""Answers in tags, and how they are compared with the gold answer: as text or as numbers."""

import math
import re
from collections.abc import Callable
from decimal import Decimal

Comparison = Callable[[str, str], float]

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# Longer answers are wrong: nothing that is asked for has so many characters, and parsing must stay quick.
MAX_ANSWER_CHARACTERS = 1000
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,100})(?:\.[0-9]{1,100})?")


def parse_answer(completion: str) -> str | None:
    """The text in the last answer tags, or None. A completion without tags has no answer."""
    # Without what follows the last closing tag: unclosed tags would each be searched to the end, in quadratic time.
    closed, tag, _ = completion.rpartition("</answer>")
    answers = _ANSWER.findall(closed + tag)
    return answers[-1].strip() if answers else None


def accuracy(compare: Comparison) -> Comparison:
    """(completion, gold) -> 1 for a right answer in answer tags, else 0."""

    def judge(completion: str, gold: str) -> float:
        answer = parse_answer(completion)
        if answer is None or len(answer) > MAX_ANSWER_CHARACTERS:
            answer = ""  # compared all the same, so that an unparsable gold answer shows
        return compare(answer, gold)

    return judge


def equal_text(answer: str, gold: str) -> float:
    """1.0 when the texts are equal but for surrounding white space."""
    return float(answer.strip() == gold.strip())


def equal_number(answer: str, gold: str) -> float:
    """1.0 when the answer is one number of the gold answer's value; NaN when the gold answer is no number."""
    expected = _parse_number(gold)
    if expected is None:
        return math.nan
    return float(_parse_number(answer) == expected)


def _parse_number(text: str) -> Decimal | None:
    cleaned = text.strip().removeprefix("$").removesuffix(".")
    # Exactly: as floats, long numbers would equal their neighbours, and the longest ones each other.
    return Decimal(cleaned.replace(",", "")) if _NUMBER.fullmatch(cleaned) else None
