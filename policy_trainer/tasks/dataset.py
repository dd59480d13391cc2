"""Any Hugging Face dataset, from the Hub or the local disk, with a column of prompts and one of answers."""

from functools import partial

from policy_trainer.config import ColumnsConfig, SourceConfig
from policy_trainer.data.fields import answer_of, messages_of, text_of
from policy_trainer.data.problem import Problem
from policy_trainer.data.rows import Row
from policy_trainer.rewards import COMPARISONS
from policy_trainer.rewards.correctness import ByAnswer
from policy_trainer.tasks.problem_set import ProblemSet, read_split, user_message


def dataset(source: SourceConfig, seed: int) -> ProblemSet:
    """Problems of data.dataset, or of a file. Raises UserError, naming the row, for a row that cannot be used."""
    wanted = ((source.columns.prompt,), (source.columns.answer,))
    split = read_split(source, partial(_problem, columns=source.columns), wanted)
    return ProblemSet("dataset", split, ByAnswer(COMPARISONS[source.answer_rule]), seed)


def _problem(row: Row, where: str, columns: ColumnsConfig) -> Problem:
    """A prompt that is a text becomes a user message; a list is a conversation."""
    prompt = columns.prompt
    gold = answer_of(row, columns.answer, where)
    is_conversation = isinstance(row.get(prompt), list)
    messages = messages_of(row, prompt, where) if is_conversation else user_message(text_of(row, prompt, where))
    return Problem(gold, messages)
