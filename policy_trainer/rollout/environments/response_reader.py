"""Parses model output in a process that is killed when parsing takes too long: a tokenizer may have patterns of its
own, and these may take hours on some sampled texts."""

from collections.abc import Mapping
from typing import Any

from policy_trainer.config import TurnsConfig
from policy_trainer.data.problem import Tools
from policy_trainer.processes.messages import ProcessEnded
from policy_trainer.processes.user_process import UserProcess
from shared.errors import UserError

_CHILD = "policy_trainer.rollout.environments.response_reader_child"
_START_SECONDS = 120.0
# Parsing usually takes milliseconds. Rows that are being sampled wait for it.
_MOST_SECONDS = 5.0
_GIB = 2**30


class ResponseReader:
    """Parses one text at a time. Its process is started at once, and restarted after it was killed."""

    def __init__(self, turns: TurnsConfig) -> None:
        self._seconds = min(turns.seconds, _MOST_SECONDS)
        self._memory = int(turns.memory_gib * _GIB)
        self._process = self._start()
        self._ready = False

    def read(
        self, text: str, template: Mapping[str, Any], *, prefix: str, tools: Tools, call_begins: str
    ) -> tuple[Mapping[str, Any], str]:
        """The message that a transformers response template parses, empty if there is none; and why a call in the text
        cannot be read, empty if there is no such call.

        prefix: what the chat template opens the turn with. call_begins: a pattern that matches the beginning of a call.
        Raises UserError if the process cannot be started.
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
            return {}, f"reading it {ended}"
        return answer["message"], answer["problem"]

    def _ask_twice(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Again if the process ended by itself, as when the system has killed it. Raises ProcessEnded: a text that ends
        two processes is at fault."""
        try:
            return self._ask(request)
        except ProcessEnded as ended:
            if ended.too_slow:
                raise
        return self._ask(request)

    def _ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self._wait_until_ready()
        return self._process.ask("read", self._seconds, **request)

    def _start(self) -> UserProcess:
        return UserProcess(_CHILD, memory=self._memory)

    def _wait_until_ready(self) -> None:
        if self._ready and self._process.alive:
            return
        if self._ready:
            self._process = self._start()
        try:
            self._process.ask("ready", _START_SECONDS)
        except ProcessEnded as ended:
            raise UserError(f"tools: the process that reads the model's calls {ended}") from None
        self._ready = True
