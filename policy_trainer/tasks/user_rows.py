"""The tasks `jsonl` and `dataset`: problems from the rows of a user's own data.

A problem has the row's prompt, its gold answer where there is one, and all columns as extras for the rewards.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from policy_trainer.config import ColumnsConfig, CommonConfig, SourceConfig
from policy_trainer.data.problem import Problem, Task
from policy_trainer.data.rows import Row, answer_of, can_be_answer, messages_of, text_of
from policy_trainer.rewards import COMPARISONS
from policy_trainer.rewards.answers import ByAnswer
from policy_trainer.rewards.registry import needs_answers, tagged_rewards
from policy_trainer.tasks.problem_set import (
    THINK_THEN_ANSWER,
    Parse,
    ProblemSet,
    read_split,
    user_message,
)
from shared.errors import UserError

MESSAGES = "messages"
# The rewards that THINK_THEN_ANSWER suits. Published recipes look for forms of their own.
_SUITED_REWARDS = {"accuracy", "format", "tags"}


def row_task(name: str, source: SourceConfig, config: CommonConfig) -> Task:
    """The task `jsonl` or `dataset`. Rows may lack answers that no reward needs.

    Problems ask for answer tags if all rewards that look for tags know that form. Raises UserError, naming file and
    line, or dataset and row, for a row that cannot be used.
    """
    task = ROW_TASKS[name](source, config.seed, answers=needs_answers(config.rewards))
    tagged = tagged_rewards(config, task)
    return task.changed(_ask_for_tags) if tagged and tagged <= _SUITED_REWARDS else task


def jsonl(source: SourceConfig, seed: int, *, answers: bool = True) -> ProblemSet:
    """Problems of a file with {"prompt" | "messages", "answer"} in each row. answers: whether rows need answers."""
    parse = partial(_file_problem, columns=source.columns, answers=answers)
    return _problem_set("jsonl", source, seed, (source.columns.prompt, MESSAGES), parse, answers=answers)


def dataset(source: SourceConfig, seed: int, *, answers: bool = True) -> ProblemSet:
    """Problems of data.dataset, from the Hub or the local disk, or of a file. answers: whether rows need answers."""
    parse = partial(_dataset_problem, columns=source.columns, answers=answers)
    return _problem_set("dataset", source, seed, (source.columns.prompt,), parse, answers=answers)


ROW_TASKS = {"jsonl": jsonl, "dataset": dataset}


def _problem_set(
    name: str, source: SourceConfig, seed: int, prompts: Sequence[str], parse: Parse, *, answers: bool
) -> ProblemSet:
    """prompts: the columns of which a row needs one."""
    wanted = [prompts, *([(source.columns.answer,)] if answers else [])]
    split = read_split(source, parse, wanted, others="kept")
    return ProblemSet(name, split, ByAnswer(COMPARISONS[source.answer_rule]), seed)


def _file_problem(row: Row, where: str, columns: ColumnsConfig, answers: bool) -> Problem:
    prompt, answer = columns.prompt, columns.answer
    given = [name for name in {prompt, MESSAGES} if row.get(name) is not None]
    if len(given) != 1:
        forms = f'{{"{prompt}": …, "{answer}": …}} or {{"{MESSAGES}": […], "{answer}": …}}'
        raise UserError(f"{where}: must be {forms}")
    return problem_of(row, given[0], _gold_answer(row, answer, where, required=answers), where)


def _dataset_problem(row: Row, where: str, columns: ColumnsConfig, answers: bool) -> Problem:
    return problem_of(row, columns.prompt, _gold_answer(row, columns.answer, where, required=answers), where)


def _gold_answer(row: Row, column: str, where: str, *, required: bool) -> str:
    """The gold answer in this column; empty if none is required and the value cannot be one."""
    return answer_of(row, column, where) if required or can_be_answer(row.get(column)) else ""


def problem_of(row: Row, prompt: str, answer: str, where: str) -> Problem:
    """The problem of a row. prompt: the column with a text or a list of messages. answer: the gold answer.

    A text becomes a user's message if the model has a chat template; so the problem has it in both forms.
    """
    if prompt == MESSAGES or isinstance(row.get(prompt), list):
        return Problem(answer, messages_of(row, prompt, where), extras=row)
    text = text_of(row, prompt, where)
    return Problem(answer, user_message(text), text, extras=row)


def _ask_for_tags(problem: Problem) -> Problem:
    """The problem with the system prompt THINK_THEN_ANSWER, if it has messages."""
    return replace(problem, system_prompt=THINK_THEN_ANSWER) if problem.messages else problem
