"""Mathematics: OpenR1-Math, MATH (Hendrycks et al. 2021, arXiv 2103.03874) and similar files with answers in LaTeX;
Geometry3K, problems with a diagram (Lu et al. 2021, arXiv 2105.04165); and GSM8K, grade-school problems (Cobbe et al.
2021, arXiv 2110.14168), or a file in its format."""

import re

from policy_trainer.config import SourceConfig
from policy_trainer.data.pictures import PICTURE_COLUMNS
from policy_trainer.data.problem import Problem
from policy_trainer.data.rows import Row, answer_of, text_of
from policy_trainer.data.tasks.problem_set import (
    THINK_THEN_ANSWER,
    ProblemSet,
    default_to_hub,
    read_split,
    user_message,
)
from policy_trainer.rewards import equal_math
from policy_trainer.rewards.answers import ByAnswer, last_boxed
from shared.errors import UserError

PROBLEM, QUESTION, ANSWER, SOLUTION = "problem", "question", "answer", "solution"
# The number after ####, with which every worked answer of GSM8K ends; the pattern of the dataset's own evaluation.
_GOLD = re.compile(r"####\s*(-?[0-9.,]+)")


def gsm8k(source: SourceConfig, seed: int) -> ProblemSet:
    """Problems of openai/gsm8k with its test split held out, unless the source names a file or another dataset."""
    source = default_to_hub(source, "openai/gsm8k", "main", eval_split="test")
    split = read_split(source, _gsm8k_problem, ((QUESTION,), (ANSWER,)))
    return ProblemSet("gsm8k", split, ByAnswer(equal_math), seed, shuffle=source.shuffle)


def math(source: SourceConfig, seed: int) -> ProblemSet:
    """Problems of open-r1/OpenR1-Math-220k, every tenth held out, unless the source names a file or another dataset."""
    source = default_to_hub(source, "open-r1/OpenR1-Math-220k", "default")
    split = read_split(source, _math_problem, ((PROBLEM,), (ANSWER, SOLUTION)))
    return ProblemSet("math", split, ByAnswer(equal_math), seed, shuffle=source.shuffle)


def geometry3k(source: SourceConfig, seed: int) -> ProblemSet:
    """Problems of hiyouga/geometry3k with its test split held out, unless the source names a file or another dataset.

    Each problem has a picture of its diagram.
    """
    source = default_to_hub(source, "hiyouga/geometry3k", None, eval_split="test")
    split = read_split(source, _math_problem, ((PROBLEM,), (ANSWER,), PICTURE_COLUMNS), pictures=True)
    return ProblemSet("geometry3k", split, ByAnswer(equal_math), seed, shuffle=source.shuffle)


def _math_problem(row: Row, where: str) -> Problem:
    # Open-R1's reward compares with the solution.
    extras = {SOLUTION: row[SOLUTION]} if row.get(SOLUTION) else {}
    messages = user_message(text_of(row, PROBLEM, where))
    return Problem(_gold(row, where), messages, extras=extras, system_prompt=THINK_THEN_ANSWER)


def _gold(row: Row, where: str) -> str:
    if row.get(ANSWER) not in (None, ""):
        return answer_of(row, ANSWER, where)
    gold = last_boxed(text_of(row, SOLUTION, where)) if row.get(SOLUTION) else None
    if not gold:
        raise UserError(f"{where}: must have an {ANSWER}, or a {SOLUTION} with a \\boxed{{…}}")
    return gold


def _gsm8k_problem(row: Row, where: str) -> Problem:
    golds = _GOLD.findall(text_of(row, ANSWER, where))
    gold = golds[-1].replace(",", "") if golds else ""
    if not gold:
        raise UserError(f"{where}: {ANSWER} must end with #### and a number")
    return Problem(gold, user_message(text_of(row, QUESTION, where)), system_prompt=THINK_THEN_ANSWER)
