"""Rewards of two Countdown recipes: nano-aha-moment and GRPO:Zero.

In both the prompt ends with `<think>`, so the rewards judge what was sampled alone, and the format rewards put this tag
before it.
"""

import math
import re
from fractions import Fraction

from policy_trainer.data.sample import Sample
from policy_trainer.rewards.recipes.expressions import MAX_CHARACTERS, NoExpression, evaluate
from policy_trainer.rewards.tags import matches_whole
from shared.errors import UserError

_ARITHMETIC = re.compile(r"[\d+\-*/().\s]+")
_INTEGER_ARITHMETIC = re.compile(r"[0-9+\-*/() ]+")
_THINK_TAG = re.compile(r"</?think>")
_AHA_SEAM = "</think>\n<answer>"
_ZERO_SEAM = re.compile(_AHA_SEAM)
_CLOSE_ENOUGH = Fraction(1, 100_000)


def nano_aha_format(sample: Sample) -> float:
    """1 for a think block, a line end and an answer block; 0.5 if the answer is not arithmetic; else 0."""
    text = "<think>" + sample.sampled.removesuffix("\n")
    tag = _THINK_TAG.search(text, len("<think>"))  # one block: the next think tag closes it
    start = tag.start() + len(_AHA_SEAM) if tag else 0
    if not tag or not text.startswith(_AHA_SEAM, tag.start()) or not text.endswith("</answer>", start):
        return 0.0
    answer = text[start : -len("</answer>")].strip()
    return 1.0 if _ARITHMETIC.fullmatch(answer) else 0.5


def nano_aha_equation(sample: Sample) -> float:
    """1 if the first answer whose tags are in one line uses each number once and reaches the target, else 0."""
    answers = (_first_answer(line) for line in sample.sampled.split("\n"))
    first = next((answer for answer in answers if answer is not None), "")
    return _reaches(first.strip(), sample)


def grpo_zero_format(sample: Sample) -> float:
    r"""1 for `^<think>.*?</think>\n<answer>.*?</answer>$` (DOTALL); else 0.1 for a think block plus 0.5 for an answer
    block."""
    text = "<think>" + sample.sampled
    if matches_whole(text, _ZERO_SEAM):
        return 1.0
    return 0.1 * ("</think>" in text) + 0.5 * (_first_answer(text) is not None)


def grpo_zero_equation(sample: Sample) -> float:
    """1 if the first answer, of whole numbers, operators and spaces only, uses each number once and reaches the target;
    else 0."""
    answer = (_first_answer(sample.sampled) or "").removesuffix("\n")  # `$` also matches before a final line end
    return _reaches(answer if _INTEGER_ARITHMETIC.fullmatch(answer) else "", sample)


def _first_answer(text: str) -> str | None:
    """The first match of `<answer>(.*?)</answer>` (DOTALL). If the first opening tag is not closed, no later one is."""
    _, _, rest = text.partition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    return answer if closed else None


def _reaches(expression: str, sample: Sample) -> float:
    """1 if the expression uses the problem's numbers once each and reaches its target, else 0; NaN if the problem's own
    numbers cannot be read."""
    extras = sample.problem.extras
    missing = [name for name in ("numbers", "target") if name not in extras]
    if missing:
        raise UserError(
            f"rewards: countdown rewards need problems with {' and '.join(missing)}, as in task countdown; "
            "choose other --rewards"
        )
    try:
        numbers, target = sorted(map(int, extras["numbers"])), Fraction(str(extras["target"]))
    except (TypeError, ValueError, ZeroDivisionError):
        return math.nan
    if len(expression) > MAX_CHARACTERS or sorted(map(int, re.findall(r"\d+", expression))) != numbers:
        return 0.0
    try:
        return float(abs(evaluate(expression) - target) < _CLOSE_ENOUGH)
    except NoExpression:
        return 0.0
