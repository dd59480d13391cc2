"""The messages of a row's conversation. All of their fields reach the chat template and the rewards, as in TRL."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from policy_trainer.data.pictures import PLACEHOLDER, has_pictures
from policy_trainer.data.problem import Message
from policy_trainer.data.rows import Row, encodable
from shared.errors import UserError

# An assistant message with one of these fields may lack content.
_IN_PLACE_OF_CONTENT = ("tool_calls", "reasoning_content", "reasoning", "thinking")
_USUAL = ("role", "content")
_FORM = (
    'must be a list of messages: {"role": …, "content": …} and optional further fields; content is a string or a list '
    'of {"type": "text", "text": …} and, in a row with pictures, {"type": "image"}'
)


def messages_of(row: Row, column: str, where: str) -> tuple[Message, ...]:
    """The messages of the conversation in this column, each with its role, its content and any further fields.

    Fields that are None are dropped, since tables use None for fields that a message lacks; not inside `arguments`,
    where null is a value.
    """
    messages = row.get(column)
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: {column} must be a non-empty list")
    return tuple(_message(message, row, column, f"{where}: message {k}") for k, message in enumerate(messages, 1))


def _message(message: Any, row: Row, column: str, where: str) -> Message:
    place = where.rpartition(":")[0]
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"{place}: {column} {_FORM}")
    fields = _without_none(message)
    if "content" not in fields:
        if fields["role"] != "assistant" or not any(fields.get(name) for name in _IN_PLACE_OF_CONTENT):
            raise UserError(
                f"{where} of {column} has no content: only assistant messages with tool_calls or reasoning_content "
                "may omit it"
            )
        fields["content"] = ""
    if (content := _content(fields["content"], row)) is None:
        raise UserError(f"{place}: {column} {_FORM}")
    calls = fields.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise UserError(
            f'{where} of {column}: tool_calls must be a list of {{"function": {{"name": …, "arguments": …}}}}'
        )
    fields["content"] = content
    for name, value in fields.items():
        for text in _texts(value):
            encodable(text, f"{name} of {column}", place)
    return fields


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: each if name == "arguments" else _without_none(each)
            for name, each in value.items()
            if each is not None
        }
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _texts(value: Any) -> list[str]:
    """All strings in a field, including the keys of objects."""
    if isinstance(value, dict):
        return [text for pair in value.items() for each in pair for text in _texts(each)]
    if isinstance(value, list):
        return [text for each in value for text in _texts(each)]
    return [value] if isinstance(value, str) else []


def _content(content: Any, row: Row) -> str | None:
    """The content as one text, with a placeholder for each picture of the row; None if it has another form."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [_block(block, row) if isinstance(block, dict) else None for block in content]
    return None if None in texts else "".join(text for text in texts if text)


def _block(block: Mapping[str, Any], row: Row) -> str | None:
    match block.get("type"):
        case "text" if isinstance(block.get("text"), str):
            return block["text"]
        case "image" if has_pictures(row):
            return PLACEHOLDER
        case _:
            return None


def contents(messages: Sequence[Message]) -> list[str]:
    """The contents of messages that no chat template renders. Raises UserError for further fields, which would be
    lost."""
    for message in messages:
        if further := further_fields(message):
            raise UserError(
                f"data: a message has {further}, which only a chat template can render",
                "use a model with a chat template and data.prompt_style = chat, or remove the field",
            )
    return [message["content"] for message in messages]


def answer_of_messages(message: Message, where: str) -> str:
    """The content of an answer to train on. Raises UserError for further fields, which would be lost."""
    if further := further_fields(message):
        raise UserError(
            f"{where}: the last message has {further}, but only its content is trained on",
            "put the whole turn into the content, as the model would write it, or remove the field",
        )
    return message["content"]


def as_text(messages: Sequence[Message]) -> str:
    """The messages for a reader: the content of a single one; of several each with its role and further fields."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{message['role']}: {' '.join(_parts(message))}" for message in messages)


def _parts(message: Message) -> list[str]:
    content = [message["content"]] if message["content"] else []
    return [
        *content,
        *(f"{name} {json.dumps(message[name], ensure_ascii=False, default=str)}" for name in _further(message)),
    ]


def further_fields(message: Message) -> str:
    """The names of the non-empty fields other than role and content."""
    return ", ".join(_further(message))


def _further(message: Message) -> list[str]:
    return [name for name, value in message.items() if name not in _USUAL and value not in ("", [], {})]
