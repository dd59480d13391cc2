"""The user's own problems: a file with one {"prompt" | "messages", "answer"} a line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from policy_trainer.rewards import Comparison
from policy_trainer.tasks.interface import Problem
from policy_trainer.tasks.shuffle import Shuffle
from shared.refusal import Refused

# Without a file of held-out problems, every tenth line is held out.
HELD_OUT_EVERY = 10


class Jsonl:
    """Problems from a file. Raises Refused, naming file and line, for one that is no problem."""

    name = "jsonl"
    default_rewards = ("accuracy", "format")

    def __init__(self, path: Path, held_out_path: Path | None, compare: Comparison, seed: int) -> None:
        self.compare = compare
        problems = read_problems(path, "data.path")
        if held_out_path:
            self._train, self._held_out = problems, read_problems(held_out_path, "data.held_out_path")
        else:
            self._train = [problem for i, problem in enumerate(problems) if i % HELD_OUT_EVERY]
            self._held_out = problems[::HELD_OUT_EVERY]
        if not self._train:
            raise Refused(f"data.path: {path} has too few problems: one of every {HELD_OUT_EVERY} is held out")
        self._shuffle = Shuffle(len(self._train), seed)

    def problem(self, index: int) -> Problem:
        """Passes over the file, each in an order of its own."""
        return self._train[self._shuffle.place(index)]

    def held_out(self) -> Sequence[Problem]:
        return self._held_out


def read_problems(path: Path, setting: str) -> list[Problem]:
    """All problems of a file, in order; blank lines are skipped. setting: the field to name in errors."""
    try:
        # Not splitlines: it also splits at characters that JSON allows within a text, such as U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{setting}: {path} cannot be read as UTF-8 text: {error}") from None
    problems = [_problem(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not problems:
        raise Refused(f"{setting}: {path} has no problems")
    return problems


def _problem(line: str, where: str) -> Problem:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{where}: is not JSON: {error}") from None
    if not isinstance(record, dict) or "answer" not in record or ("prompt" in record) == ("messages" in record):
        raise Refused(f'{where}: must be {{"prompt": …, "answer": …}} or {{"messages": […], "answer": …}}')
    answer = _answer(record["answer"], where)
    if "prompt" in record:
        if not isinstance(record["prompt"], str) or not record["prompt"]:
            raise Refused(f"{where}: prompt must be a text that is not empty")
        return Problem(answer=answer, prompt=record["prompt"])
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise Refused(f"{where}: messages must be a list that is not empty")
    return Problem(answer=answer, messages=tuple(_message(message, where) for message in messages))


def _answer(answer: Any, where: str) -> str:
    if answer == "" or isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise Refused(f"{where}: answer must be a number or a text that is not empty")
    return str(answer)


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise Refused(f'{where}: messages must each be {{"role": …, "content": …}}')
    return {"role": message["role"], "content": message["content"]}
