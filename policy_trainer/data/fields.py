"""What stands in a row. Raises UserError, naming column and place, for what cannot be used."""

from policy_trainer.data.problem import Message
from policy_trainer.data.rows import Row
from shared.errors import UserError


def text_of(row: Row, column: str, where: str) -> str:
    """The text in this column. Raises UserError for one that is missing, empty, or no text."""
    value = row.get(column)
    if not isinstance(value, str) or not value:
        raise UserError(f"{where}: {column} must be a text that is not empty")
    return _whole(value, column, where)


def answer_of(row: Row, column: str, where: str) -> str:
    """The gold answer in this column, a number or a text."""
    value = row.get(column)
    if value == "" or isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{where}: {column} must be a number or a text that is not empty")
    return _whole(str(value), column, where)


def messages_of(row: Row, column: str, where: str) -> tuple[Message, ...]:
    """The conversation in this column."""
    messages = row.get(column)
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: {column} must be a list that is not empty")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UserError(f'{where}: {column} must each be {{"role": …, "content": …}}')
    return tuple(
        {key: _whole(message[key], f"{key} of {column}", where) for key in ("role", "content")} for message in messages
    )


def _whole(text: str, column: str, where: str) -> str:
    """JSON can spell half of a character, which no tokenizer takes and no file holds."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UserError(f"{where}: {column} has {half} at character {error.start + 1}: half a surrogate pair") from None
    return text
