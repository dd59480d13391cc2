"""A problem from a row of a user's own data: its prompt, its gold answer where there is one, and all columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policy_trainer.data.fields import answer_of, can_be_answer, messages_of, text_of
from policy_trainer.data.problem import Problem
from policy_trainer.data.rows import Row
from policy_trainer.tasks.problem_set import user_message

MESSAGES = "messages"


def answer_if_any(row: Row, column: str, where: str) -> str:
    """The gold answer in this column, or an empty text if the value cannot be one."""
    return answer_of(row, column, where) if can_be_answer(row.get(column)) else ""


@dataclass(frozen=True)
class Answers:
    """Gold answers. read: that of a row. wanted: the columns that a source must have, as alternatives."""

    read: Callable[[Row, str, str], str]
    wanted: Callable[[str], Sequence[Sequence[str]]]


# Which one is used depends on the rewards: see tasks/registry.py.
REQUIRED = Answers(answer_of, lambda column: ((column,),))
OPTIONAL = Answers(answer_if_any, lambda column: ())


def problem_of(row: Row, prompt: str, answer: str, where: str) -> Problem:
    """The problem of a row. prompt: the column with a text or a list of messages. answer: the gold answer.

    A text becomes a user's message where the model has a chat template; so the problem has it in both forms.
    """
    if prompt == MESSAGES or isinstance(row.get(prompt), list):
        return Problem(answer, messages_of(row, prompt, where), extras=row)
    text = text_of(row, prompt, where)
    return Problem(answer, user_message(text), text, extras=row)
