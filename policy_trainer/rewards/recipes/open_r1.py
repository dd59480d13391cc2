"""Rewards of Open-R1's recipe for mathematics."""

import math
import re

from policy_trainer.data.sample import Sample
from policy_trainer.rewards.mathematics import read_gold, read_solution, same

_START = "<think>\n"
_SEAM = "\n</think>\n<answer>\n"
_END = re.compile(r"\n</answer>$", re.MULTILINE)
_COUNTED = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")


def open_r1_accuracy(sample: Sample) -> float:
    """1 if math-verify finds an answer in the completion that equals the gold answer, else 0."""
    expected = read_gold(sample.problem.answer)
    if not expected:
        return math.nan
    return float(same(expected, read_solution(sample.completion)))


def open_r1_format(sample: Sample) -> float:
    r"""1 for `^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$` (DOTALL, MULTILINE), else 0.

    In linear time: only the first seam is tried, since the text after a later one is shorter.
    """
    text = sample.completion
    seam = text.find(_SEAM, len(_START))
    whole = text.startswith(_START) and seam >= 0 and _END.search(text, seam + len(_SEAM))
    return 1.0 if whole else 0.0


def open_r1_tag_count(sample: Sample) -> float:
    """0.25 for each of the four tags, with its line ends, that occurs exactly once."""
    return 0.25 * sum(sample.completion.count(tag) == 1 for tag in _COUNTED)
