"""Grade-school mathematics: GSM8K (Cobbe et al. 2021, arXiv 2110.14168), or a file in its format."""

import re

from policy_trainer.config import SourceConfig
from policy_trainer.data.fields import text_of
from policy_trainer.data.problem import Problem
from policy_trainer.data.rows import Row
from policy_trainer.rewards import equal_math
from policy_trainer.rewards.correctness import ByAnswer
from policy_trainer.tasks.problem_set import THINK_THEN_ANSWER, ProblemSet, default_to_hub, read_split, user_message
from shared.errors import UserError

QUESTION, ANSWER = "question", "answer"
# The number after ####, with which every worked answer ends; the pattern of the dataset's own evaluation.
_GOLD = re.compile(r"####\s*(-?[0-9.,]+)")


def gsm8k(source: SourceConfig, seed: int) -> ProblemSet:
    """Problems of openai/gsm8k with its test split held out, unless the source names a file or another dataset."""
    source = default_to_hub(source, "openai/gsm8k", "main", eval_split="test")
    return ProblemSet("gsm8k", read_split(source, _problem, ((QUESTION,), (ANSWER,))), ByAnswer(equal_math), seed)


def _problem(row: Row, where: str) -> Problem:
    golds = _GOLD.findall(text_of(row, ANSWER, where))
    gold = golds[-1].replace(",", "") if golds else ""
    if not gold:
        raise UserError(f"{where}: {ANSWER} must end with #### and a number")
    return Problem(gold, user_message(text_of(row, QUESTION, where)), system_prompt=THINK_THEN_ANSWER)
