"""Rewards of two recipes on Countdown: nano-aha-moment's and GRPO:Zero's.

Both let the prompt end in `<think>`, which their formats put back.
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
    """1 for one think block, a line end, an answer block and the end; 0.5 when the answer is no arithmetic; else 0."""
    text = "<think>" + sample.completion.removesuffix("\n")
    tag = _THINK_TAG.search(text, len("<think>"))  # one block: the next think tag closes it
    start = tag.start() + len(_AHA_SEAM) if tag else 0
    if not tag or not text.startswith(_AHA_SEAM, tag.start()) or not text.endswith("</answer>", start):
        return 0.0
    answer = text[start : -len("</answer>")].strip()
    return 1.0 if _ARITHMETIC.fullmatch(answer) else 0.5


def nano_aha_equation(sample: Sample) -> float:
    """1 when the first answer that stands in one line uses each number once and reaches the target, else 0."""
    answers = (_first_answer(line) for line in sample.completion.split("\n"))
    first = next((answer for answer in answers if answer is not None), "")
    return _reaches(first.strip(), sample)


def grpo_zero_format(sample: Sample) -> float:
    r"""1 for `^<think>.*?</think>\n<answer>.*?</answer>$` (DOTALL); else 0.1 for a think, 0.5 for an answer block."""
    text = "<think>" + sample.completion
    if matches_whole(text, _ZERO_SEAM):
        return 1.0
    return 0.1 * ("</think>" in text) + 0.5 * (_first_answer(text) is not None)


def grpo_zero_equation(sample: Sample) -> float:
    """1 when the first answer, whole numbers and spaces alone, uses each number once and reaches the target, else 0."""
    answer = _first_answer(sample.completion) or ""
    return _reaches(answer if _INTEGER_ARITHMETIC.fullmatch(answer) else "", sample)


def _first_answer(text: str) -> str | None:
    """What `<answer>(.*?)</answer>` finds, DOTALL. If the first opening tag is not closed, no later one is."""
    _, _, rest = text.partition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    return answer if closed else None


def _reaches(expression: str, sample: Sample) -> float:
    """NaN when the problem's own numbers are none."""
    asked = sample.problem.extras
    missing = [name for name in ("numbers", "target") if name not in asked]
    if missing:
        raise UserError(
            f"rewards: countdown rewards want problems with {' and '.join(missing)}, as task countdown has; "
            "--rewards takes others"
        )
    try:
        numbers, target = sorted(map(int, asked["numbers"])), Fraction(str(asked["target"]))
    except (TypeError, ValueError, ZeroDivisionError):
        return math.nan
    if len(expression) > MAX_CHARACTERS or sorted(map(int, re.findall(r"\d+", expression))) != numbers:
        return 0.0
    try:
        return float(abs(evaluate(expression) - target) < _CLOSE_ENOUGH)
    except NoExpression:
        return 0.0
