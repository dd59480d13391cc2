"""The user's own problems: a file with one {"prompt" | "messages", "answer"} per line."""

from functools import partial

from policy_trainer.config import ColumnsConfig, SourceConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.rows import Row
from policy_trainer.rewards import COMPARISONS
from policy_trainer.rewards.correctness import ByAnswer
from policy_trainer.tasks.own_rows import MESSAGES, REQUIRED, Answers, problem_of
from policy_trainer.tasks.problem_set import ProblemSet, read_split
from shared.errors import UserError


def jsonl(source: SourceConfig, seed: int, answers: Answers = REQUIRED) -> ProblemSet:
    """Problems from a file. Raises UserError, naming file and line, for a line that cannot be used."""
    columns = source.columns
    wanted = ((columns.prompt, MESSAGES), *answers.wanted(columns.answer))
    split = read_split(source, partial(_problem, columns=columns, answers=answers), wanted, others="kept")
    return ProblemSet("jsonl", split, ByAnswer(COMPARISONS[source.answer_rule]), seed)


def _problem(row: Row, where: str, columns: ColumnsConfig, answers: Answers) -> Problem:
    prompt, answer = columns.prompt, columns.answer
    given = [name for name in {prompt, MESSAGES} if row.get(name) is not None]
    if len(given) != 1:
        forms = f'{{"{prompt}": …, "{answer}": …}} or {{"{MESSAGES}": […], "{answer}": …}}'
        raise UserError(f"{where}: must be {forms}")
    return problem_of(row, given[0], answers.read(row, answer, where), where)
