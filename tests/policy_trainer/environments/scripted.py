"""A sampler that says what a script tells it, and the tools and environments of the tests."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from policy_trainer.data.completion import Completion
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.sampling.sampler import SamplingParams


class Script:
    """turns: of each row, the ids of its turns. A turn that does not end with an id of `eos` is cut off."""

    def __init__(
        self,
        turns: Mapping[int, Sequence[Sequence[int]]],
        eos: Sequence[int],
        *,
        fails_after: int | None = None,
        device_seconds: float = 0.0,
    ) -> None:
        """fails_after: calls of `advance`. device_seconds: how long it waits for its device."""
        self._left = fails_after
        self._device_seconds = device_seconds
        self.turns = {row: list(each) for row, each in turns.items()}
        self.prompts: dict[int, list[list[int]]] = {row: [] for row in turns}
        self._eos = eos
        self._ready: list[tuple[int, Completion]] = []

    @contextmanager
    def running_batch(self, params: SamplingParams, seed: int) -> Iterator["Script"]:
        time.sleep(self._device_seconds)
        yield self

    def add(self, rows: Sequence[int], prompt: EncodedPrompt, max_tokens: int) -> None:
        for row in rows:
            self.prompts[row].append(prompt.ids)
            ids = list(self.turns[row].pop(0))[:max_tokens]
            ended = ids[-1] in self._eos
            logps = -np.arange(1, len(ids) + 1, dtype=np.float32) / 16
            self._ready.append((row, Completion(np.array(ids, np.int64), logps, ended, ended)))

    def advance(self) -> list[tuple[int, Completion]]:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("the sampler is gone")
        ready, self._ready = self._ready, []
        return ready

    def __len__(self) -> int:
        return len(self._ready) + (self._left is not None)


def add(a: int, b: int = 0) -> int:
    """
    Adds.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def shout(text: str) -> str:
    """
    Shouts.

    Args:
        text: What to shout.
    """
    return text.upper()


def fail(reason: str) -> str:
    """
    Fails.

    Args:
        reason: Why.
    """
    raise ValueError(reason)


class Counter:
    """TRL's kind of environment: it counts."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self, start: int = 0, **columns: Any) -> str:
        self.count = start
        return f" It stands at {start}."

    def increment(self, step: int) -> int:
        """
        Counts on.

        Args:
            step: By how much.
        """
        self.count += step
        return self.count

    def wait(self, seconds: float) -> None:
        """
        Waits.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)

    def get_reward(self) -> float:
        return self.count / 10

    def get_step_reward(self) -> float:
        return 0.5


class Fragile:
    """Its resets fail as often as the row says, in all processes together; a file counts them."""

    def reset(self, fails: int = 0, file: str = "", **columns: Any) -> None:
        if fails:
            with suppress(OSError), open(file, "a") as tries:
                tries.write("x")
            if fails > 1 or Path(file).stat().st_size <= fails:
                raise ValueError("not now")


class Mortal:
    def reset(self, **columns: Any) -> None: ...

    def leave(self) -> None:
        """Ends the process."""
        os._exit(3)


class Dice:
    """Each reset draws a number, by which the rollouts of a group must not differ."""

    def reset(self, **columns: Any) -> str:
        import random

        return f" {random.random()}"

    def roll(self) -> int:
        """Rolls."""
        return 4


class Unseeded(Dice):
    def reset(self, **columns: Any) -> str:
        import secrets

        return secrets.token_hex()
