"""The tasks `jsonl` and `dataset`: problems from the rows of a user's own data.

A problem has the row's prompt, its pictures, gold answer and variables of the chat template where there are any, and
all other columns as extras for the rewards.
"""

from collections.abc import Sequence

from policy_trainer.config import SourceConfig
from policy_trainer.data.messages import messages_of
from policy_trainer.data.problem import Problem
from policy_trainer.data.rows import Row, answer_of, can_be_answer, template_kwargs_of, text_of
from policy_trainer.data.tasks.problem_set import (
    DEFAULT_REWARDS,
    THINK_THEN_ANSWER,
    ProblemSet,
    read_split,
    user_message,
)
from policy_trainer.rewards import COMPARISONS
from policy_trainer.rewards.answers import PLACES, ByAnswer
from policy_trainer.rewards.registry import needs_answers, tagged_rewards
from shared.errors import UserError

ROW_TASKS = ("jsonl", "dataset")
# The columns of a prompt: the first that a row has. A column that the user names is the only one.
PROMPT_COLUMNS = ("prompt", "messages", "problem")
# The rewards that THINK_THEN_ANSWER suits. Published recipes look for forms of their own.
_SUITED_REWARDS = {"accuracy", "format", "tags"}


def row_task(
    name: str, source: SourceConfig, seed: int, rewards: Sequence[str] = (), *, prompt_needed: bool = True
) -> ProblemSet:
    """The task `jsonl` or `dataset`, whose rows have a prompt, messages or a problem.

    rewards: those of the run; none for the task's. Rows may lack answers that no reward needs. Problems ask for answer
    tags if answers are looked for there and all rewards that look for tags know that form. prompt_needed: False where
    an environment shows the problem. Raises UserError, naming file and line, or dataset and row, for a row that cannot
    be used.
    """
    named, answer = source.columns.prompt, source.columns.answer
    prompts = PROMPT_COLUMNS if named == PROMPT_COLUMNS[0] else (named,)
    answer_needed = needs_answers(rewards)
    correct = ByAnswer(COMPARISONS[source.answer_rule], PLACES[source.answer_in])
    in_tags = source.answer_in == "tags"
    default = DEFAULT_REWARDS if in_tags else ("accuracy",)
    tagged = tagged_rewards(rewards or default, correct)
    system_prompt = THINK_THEN_ANSWER if in_tags and tagged and tagged <= _SUITED_REWARDS else ""

    def problem(row: Row, where: str) -> Problem:
        column = next((column for column in prompts if row.get(column) is not None), None)
        if column is None and prompt_needed:
            raise UserError(f"{where}: must have a {' or '.join(prompts)}")
        gold = answer_of(row, answer, where) if answer_needed or can_be_answer(row.get(answer)) else ""
        if column is None:
            messages, text = user_message(""), ""
        elif column == "messages" or isinstance(row.get(column), list):
            messages, text = messages_of(row, column, where), ""
        else:  # in both forms: the text is a user's message if the model has a chat template
            text = text_of(row, column, where)
            messages = user_message(text)
        variables = template_kwargs_of(row, where)
        return Problem(gold, messages, text, extras=row, system_prompt=system_prompt, chat_template_kwargs=variables)

    wanted = [*([prompts] if prompt_needed else []), *([(answer,)] if answer_needed else [])]
    split = read_split(source, problem, wanted, others="kept", pictures=True)
    return ProblemSet(name, split, correct, seed, default, shuffle=source.shuffle)
