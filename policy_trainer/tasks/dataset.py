"""Any Hugging Face dataset, from the Hub or the local disk, with a column of prompts and one of answers."""

from policy_trainer.config import SourceConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.rows import Row
from policy_trainer.rewards import COMPARISONS
from policy_trainer.rewards.correctness import ByAnswer
from policy_trainer.tasks.own_rows import REQUIRED, Answers, problem_of
from policy_trainer.tasks.problem_set import ProblemSet, read_split


def dataset(source: SourceConfig, seed: int, answers: Answers = REQUIRED) -> ProblemSet:
    """Problems of data.dataset, or of a file. Raises UserError, naming the row, for a row that cannot be used."""
    prompt, answer = source.columns.prompt, source.columns.answer

    def problem(row: Row, where: str) -> Problem:
        return problem_of(row, prompt, answers.read(row, answer, where), where)

    split = read_split(source, problem, ((prompt,), *answers.wanted(answer)), others="kept")
    return ProblemSet("dataset", split, ByAnswer(COMPARISONS[source.answer_rule]), seed)
