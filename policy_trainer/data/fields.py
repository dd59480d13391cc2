"""Checked fields of a row. Every function raises UserError, with column and place, for a value it cannot use."""

import json
import math
from textwrap import shorten

from policy_trainer.data.problem import Message
from policy_trainer.data.rows import Row
from shared.errors import UserError


def text_of(row: Row, column: str, where: str) -> str:
    """The text in this column. Raises UserError if it is missing, empty, or not a text."""
    value = row.get(column)
    if not isinstance(value, str) or not value:
        raise UserError(f"{where}: {column} must be a text that is not empty")
    return _encodable(value, column, where)


def answer_of(row: Row, column: str, where: str) -> str:
    """The gold answer in this column, a number or a text, as text."""
    value = row.get(column)
    if not can_be_answer(value):
        raise UserError(f"{where}: {column} must be a number or a text that is not empty{_got(value)}")
    return _encodable(str(value), column, where)


def can_be_answer(value: object) -> bool:
    """Whether a value can be a gold answer. Tables of pandas have NaN where an answer is missing."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int) and not isinstance(value, bool) and value != ""


def _got(value: object) -> str:
    return f", got {shorten(json.dumps(value, default=str), 60, placeholder=' …')}"


def messages_of(row: Row, column: str, where: str) -> tuple[Message, ...]:
    """The messages of the conversation in this column, each with role and content."""
    messages = row.get(column)
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: {column} must be a list that is not empty")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UserError(f'{where}: {column} must contain only {{"role": …, "content": …}}')
    return tuple(
        {key: _encodable(message[key], f"{key} of {column}", where) for key in ("role", "content")}
        for message in messages
    )


def _encodable(text: str, column: str, where: str) -> str:
    """The text. Raises UserError for a lone surrogate: JSON can spell one, but it cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UserError(
            f"{where}: {column} has {half} at character {error.start + 1}: half a surrogate pair; write the whole "
            "character, or leave it out"
        ) from None
    return text
