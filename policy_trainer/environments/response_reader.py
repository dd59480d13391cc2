"""Parses what models write, in a process that is killed when that takes too long: a tokenizer brings patterns of its
own, and a sampled text may be one on which they take hours."""

from collections.abc import Mapping
from typing import Any

from policy_trainer.config import TurnsConfig
from policy_trainer.data.problem import Tools
from policy_trainer.rewards.sandbox import ProcessEnded, SandboxProcess
from shared.errors import UserError

_CHILD = "policy_trainer.environments.response_reader_child"
_START_SECONDS = 120.0
# Milliseconds are usual. The rows that are being sampled wait for it.
_MOST_SECONDS = 5.0
_GIB = 2**30


class ResponseReader:
    """Reads one text at a time. Its process starts at once, and again after it was killed."""

    def __init__(self, turns: TurnsConfig) -> None:
        self._seconds = min(turns.seconds, _MOST_SECONDS)
        self._memory = int(turns.memory_gib * _GIB)
        self._process = self._start()
        self._ready = False

    def read(
        self, text: str, template: Mapping[str, Any], *, prefix: str, tools: Tools, call_begins: str
    ) -> tuple[Mapping[str, Any], str]:
        """The message by a response template of transformers, empty if it has none; and why the call that the text
        begins cannot be read, empty if there is none or it can be read.

        prefix: what the chat template opens the turn with. call_begins: a pattern of what begins a call. Raises
        UserError if the process cannot be started, or ends by itself twice on this text, as when memory is short.
        """
        request = {
            "text": text,
            "template": template,
            "prefix": prefix,
            "tools": [dict(tool) for tool in tools],
            "call_begins": call_begins,
        }
        try:
            answer = self._ask_twice(request)
        except ProcessEnded as ended:
            if not ended.too_slow:
                raise UserError(f"tools: the process that reads the model's calls {ended}") from None
            return {}, f"reading it {ended}"
        return answer["message"], answer["problem"]

    def _ask_twice(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Again if the process ended by itself, as when the system has killed it. Raises ProcessEnded."""
        try:
            return self._ask(request)
        except ProcessEnded as ended:
            if ended.too_slow:
                raise
        return self._ask(request)

    def _ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self._wait_until_ready()
        self._process.send(request, seconds=self._seconds)
        return self._process.receive(seconds=self._seconds)

    def _start(self) -> SandboxProcess:
        return SandboxProcess(memory=self._memory, seconds=self._seconds, module=_CHILD)

    def _wait_until_ready(self) -> None:
        if self._ready and self._process.alive:
            return
        if self._ready:
            self._process = self._start()
        try:
            answer = self._process.receive(seconds=_START_SECONDS)
        except ProcessEnded as ended:
            raise UserError(f"tools: the process that reads the model's calls {ended}") from None
        if "refused" in answer:
            raise UserError(answer["refused"])
        self._ready = True
