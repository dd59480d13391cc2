"""The user's own problems: a file with one {"prompt" | "messages", "answer"} per line."""

from functools import partial

from policy_trainer.config import ColumnsConfig, SourceConfig
from policy_trainer.data.fields import answer_of, messages_of, text_of
from policy_trainer.data.problem import Problem
from policy_trainer.data.rows import Row
from policy_trainer.rewards import COMPARISONS
from policy_trainer.rewards.correctness import ByAnswer
from policy_trainer.tasks.problem_set import ProblemSet, read_split
from shared.errors import UserError

MESSAGES = "messages"


def jsonl(source: SourceConfig, seed: int) -> ProblemSet:
    """Problems from a file. Raises UserError, naming file and line, for a line that cannot be used."""
    wanted = ((source.columns.prompt, MESSAGES), (source.columns.answer,))
    split = read_split(source, partial(_problem, columns=source.columns), wanted)
    return ProblemSet("jsonl", split, ByAnswer(COMPARISONS[source.answer_rule]), seed)


def _problem(row: Row, where: str, columns: ColumnsConfig) -> Problem:
    """A prompt that is a text is used as it is, without the chat template; a list is a conversation."""
    prompt, answer = columns.prompt, columns.answer
    given = [name for name in {prompt, MESSAGES} if name in row]
    if len(given) != 1 or answer not in row:
        forms = f'{{"{prompt}": …, "{answer}": …}} or {{"{MESSAGES}": […], "{answer}": …}}'
        raise UserError(f"{where}: must be {forms}")
    (name,) = given
    gold = answer_of(row, answer, where)
    if name == MESSAGES or isinstance(row[name], list):
        return Problem(gold, messages_of(row, name, where))
    return Problem(gold, prompt=text_of(row, name, where))
