"""A sampler that says what a script tells it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from policy_trainer.data.completion import Completion
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.sampling.sampler import SamplingParams
from shared.sampling_mask import SamplingMask


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
        self.joined: list[int] = []  # the rows, in the order in which their turns began
        self._eos = eos
        self._ready: list[tuple[int, Completion]] = []

    @contextmanager
    def running_batch(self, params: SamplingParams, seed: int) -> Iterator["Script"]:
        time.sleep(self._device_seconds)
        yield self

    def add(self, rows: Sequence[int], prompt: EncodedPrompt, max_tokens: int) -> None:
        for row in rows:
            self.prompts[row].append(prompt.ids)
            self.joined.append(row)
            ids = list(self.turns[row].pop(0))[:max_tokens]
            ended = ids[-1] in self._eos
            logps = -np.arange(1, len(ids) + 1, dtype=np.float32) / 16
            mask = SamplingMask.of([np.array([token], np.int32) for token in ids])
            self._ready.append((row, Completion(np.array(ids, np.int64), logps, ended, ended, mask)))

    def advance(self) -> list[tuple[int, Completion]]:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("the sampler is gone")
        ready, self._ready = self._ready, []
        return ready

    def __len__(self) -> int:
        return len(self._ready) + (self._left is not None)
