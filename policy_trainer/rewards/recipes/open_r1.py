"""Rewards of Open-R1's recipe for mathematics."""

import re

from policy_trainer.data.sample import Sample, Score
from policy_trainer.rewards.mathematics import as_latex, read_first, read_latex, same

_START = "<think>\n"
_SEAM = "\n</think>\n<answer>\n"
_END = re.compile(r"\n</answer>$", re.MULTILINE)
_COUNTED = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")


def open_r1_accuracy(sample: Sample) -> Score:
    """1 if the completion's boxed formula, else one in LaTeX that it calls the answer, equals the problem's solution,
    else 0; None where math-verify reads nothing in the solution.

    The solution is the column `solution`, as in the recipe; else the gold answer, as a formula.
    """
    expected = read_first(str(sample.problem.extras.get("solution") or as_latex(sample.problem.answer)))
    return float(same(expected, read_latex(sample.completion))) if expected else None


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
