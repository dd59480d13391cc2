"""Demonstrations: prompts with the completions to imitate, as lines of a file and as token ids."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from policy_trainer.prompts import PromptEncoder
from policy_trainer.tasks.interface import Problem
from shared.batch import TokenGroup
from shared.refusal import Refused

_FORMS = (
    '{"prompt": …, "completion": …}, {"messages": […], "completion": …}, '
    'or {"messages": […, {"role": "assistant", "content": …}]}'
)


class RowTooLong(Refused):
    """A prompt and its completion have more tokens than a row may have."""


@dataclass(frozen=True)
class Demonstration:
    """A problem, whose answer nobody looks at, and what to say to it. where: its file and line, for errors."""

    problem: Problem
    completion: str
    where: str = ""


class RowEncoder:
    """Demonstration -> a group of one completion, as a sampler would have left it: with the token that ends it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompts: PromptEncoder, *, eos: int, limit: int) -> None:
        """eos: id of the token that ends a completion. limit: tokens that a row may have."""
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._eos = eos
        self._limit = limit

    def encode(self, demonstration: Demonstration) -> TokenGroup:
        """Raises RowTooLong, or Refused for what the model's chat template does not take; both say where."""
        try:
            prompt = self._prompts.encode(demonstration.problem)
        except Refused as error:
            raise Refused(f"{demonstration.where}: {error}") from error
        completion = [*self._tokenizer.encode(demonstration.completion, add_special_tokens=False), self._eos]
        tokens = len(prompt) + len(completion)
        if tokens > self._limit:
            raise RowTooLong(
                f"{demonstration.where}: has {tokens} tokens and may have {self._limit}: "
                "max_tokens, or the model's context"
            )
        return TokenGroup(
            np.array(prompt, np.int64), np.array(completion, np.int64), np.array([len(completion)], np.int64)
        )


def encode_all(
    demonstrations: Iterable[Demonstration], encoder: RowEncoder, too_long: Literal["drop", "refuse"]
) -> tuple[list[TokenGroup], int]:
    """The rows that are not too long, and how many are. Raises RowTooLong instead where that is refused."""
    rows, dropped = [], 0
    for demonstration in demonstrations:
        try:
            rows.append(encoder.encode(demonstration))
        except RowTooLong:
            if too_long == "refuse":
                raise
            dropped += 1
    return rows, dropped


def read_demonstrations(path: Path, setting: str) -> list[Demonstration]:
    """All lines of a JSONL file, in order; blank ones are skipped. setting: the field to name in errors.

    Raises Refused, naming file and line, for one that is no demonstration.
    """
    try:
        # Not splitlines: it also splits at characters that JSON allows within a text, such as U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{setting}: {path} cannot be read as UTF-8 text: {error}") from None
    found = [_demonstration(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise Refused(f"{setting}: {path} has no lines")
    return found


def _demonstration(line: str, where: str) -> Demonstration:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{where}: is not JSON: {error}") from None
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise Refused(f"{where}: must be {_FORMS}")
    if "prompt" in record:
        return Demonstration(
            Problem(answer="", prompt=_text(record, "prompt", where)), _text(record, "completion", where), where
        )
    messages = _messages(record["messages"], where)
    if "completion" in record:
        return Demonstration(Problem(answer="", messages=messages), _text(record, "completion", where), where)
    *before, last = messages
    if not before or last["role"] != "assistant" or not last["content"]:
        raise Refused(f"{where}: without a completion, messages must end with one of the assistant's; {_FORMS}")
    return Demonstration(Problem(answer="", messages=tuple(before)), last["content"], where)


def _messages(messages: Any, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise Refused(f"{where}: messages must be a list that is not empty")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise Refused(f'{where}: messages must each be {{"role": …, "content": …}}')
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _text(record: dict[str, Any], key: str, where: str) -> str:
    text = record.get(key)
    if not isinstance(text, str) or not text:
        raise Refused(f"{where}: {key} must be a text that is not empty")
    return text
