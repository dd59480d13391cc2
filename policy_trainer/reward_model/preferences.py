"""Preferences: pairs of a better and a worse answer, in TRL's preference form, read from a file or dataset."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from policy_trainer.config.supervised import PairsConfig
from policy_trainer.data.fields import messages_of, text_of
from policy_trainer.data.problem import Message, Problem
from policy_trainer.data.rows import Row, Rows, read_dataset, read_file
from policy_trainer.data.sample import Sample
from policy_trainer.supervised.row_set import every_tenth
from policy_trainer.tasks.problem_set import user_message
from shared.errors import UserError

_COLUMNS = ("prompt", "chosen", "rejected", "margin")
_FORMS = (
    '{"prompt": …, "chosen": …, "rejected": …}, texts or lists of messages, '
    'or {"chosen": […], "rejected": […]} of whole conversations'
)


@dataclass(frozen=True)
class Preference:
    """A better and a worse answer. margin: by how much their scores shall differ at least. where: file and line."""

    chosen: Sample
    rejected: Sample
    margin: float
    where: str

    @property
    def asked(self) -> str:
        """What both answer; the better text where it is not known which part of it was asked."""
        problem = self.chosen.problem
        return str(problem) if problem.messages else self.chosen.completion


def read_preferences(data: PairsConfig, note: Callable[[str], None]) -> tuple[list[Preference], list[Preference]]:
    """Pairs to train on, and held-out ones. Without held-out data of its own no prompt is in both.

    Raises UserError with file and line for a row that is not a pair.
    """
    source = f"data.path: {data.path}" if data.path else f"data.dataset: {data.dataset}"
    found = _preferences(_read(data), source)
    held_out = _read_held_out(data)
    if held_out is None:
        return every_tenth(found, lambda preference: preference.asked, source, note)
    return found, _preferences(held_out, "the held-out data")


def _read(data: PairsConfig) -> Rows:
    if data.path:
        return read_file(data.path, _COLUMNS, "data.path")
    assert data.dataset, "the configuration refuses data without a source"
    return read_dataset(data.dataset, data.subset, data.split, _COLUMNS)


def _read_held_out(data: PairsConfig) -> Rows | None:
    if data.eval_path:
        return read_file(data.eval_path, _COLUMNS, "data.eval_path")
    if data.eval_split and data.dataset and not data.path:
        return read_dataset(data.dataset, data.subset, data.eval_split, _COLUMNS)
    return None


def _preferences(rows: Rows, source: str) -> list[Preference]:
    if missing := [name for name in ("chosen", "rejected") if name not in rows.columns]:
        there = ", ".join(rows.columns) or "none"
        raise UserError(f"{source} has no column {' or '.join(missing)}; its columns: {there}. A row must be {_FORMS}")
    return [_preference(rows.row(number), rows.where(number)) for number in range(len(rows))]


def _preference(row: Row, where: str) -> Preference:
    chosen, rejected = (_sample(row, column, where) for column in ("chosen", "rejected"))
    margin = row.get("margin")
    if isinstance(margin, bool) or not isinstance(margin, int | float | None) or not math.isfinite(margin or 0):
        raise UserError(f"{where}: margin must be a finite number, got {margin!r}; leave it out for 0")
    return Preference(chosen, rejected, float(margin or 0), where)


def _sample(row: Row, column: str, where: str) -> Sample:
    """Prompt and answer of a column: a text, the messages that follow the prompt, or a whole conversation."""
    if isinstance(row.get(column), list):
        return _of_messages(messages_of(row, column, where), row, column, where)
    if not isinstance(row.get(column), str):
        raise UserError(f"{where}: {column} must be a text or a list of messages: {_FORMS}")
    text = row[column] and text_of(row, column, where)  # an empty one is left out later, and counted
    if row.get("prompt") is None:
        return Sample(Problem(answer=""), text)
    if isinstance(row["prompt"], list):
        return Sample(Problem(answer="", messages=messages_of(row, "prompt", where)), text)
    asked = text_of(row, "prompt", where)
    return Sample(Problem(answer="", messages=user_message(asked), prompt=asked), text)


def _of_messages(messages: tuple[Message, ...], row: Row, column: str, where: str) -> Sample:
    whole = (*_before(messages, row, where), *messages)
    if len(whole) < 2 or whole[-1]["role"] != "assistant":
        raise UserError(f"{where}: {column} must end with an assistant message that follows others: {_FORMS}")
    return Sample(Problem(answer="", messages=whole[:-1]), whole[-1]["content"])


def _before(messages: tuple[Message, ...], row: Row, where: str) -> tuple[Message, ...]:
    """The prompt's messages. Some datasets have its text beside conversations that begin with it."""
    if row.get("prompt") is None:
        return ()
    if isinstance(row["prompt"], list):
        return messages_of(row, "prompt", where)
    return user_message(text_of(row, "prompt", where)) if messages[0]["role"] == "assistant" else ()
