"""`python -m tests.ref_server.odd_server ODDITY serve …`: the real `ref-server`, with one thing that goes wrong."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ref_server.__main__ import main
from ref_server.queue.records import Claim
from ref_server.queue.sqlite.store import SqliteQueue
from ref_server.scoring import frozen_model
from shared.batch import TokenGroup
from shared.logprobs import choose_forward

POISON = 13


class Odd:
    """The right forward, after `before` has had its say on the groups."""

    def __init__(self, model: PreTrainedModel, before: Callable[[Sequence[TokenGroup]], None]) -> None:
        self._forward = choose_forward(model)
        self._before = before
        self.name = self._forward.name

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        self._before(groups)
        return self._forward(groups, temperatures)


def hold(_: Sequence[TokenGroup]) -> None:
    """While there is the file `hold` in the folder ODD_FOLDER a forward waits, and the file `begun` shows it."""
    folder = Path(os.environ["ODD_FOLDER"])
    while (folder / "hold").exists():
        (folder / "begun").touch()
        time.sleep(0.02)


def lose_the_device(groups: Sequence[TokenGroup]) -> None:
    if any(group.prompt_ids[0] == POISON for group in groups):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def end_the_thread(_: Sequence[TokenGroup]) -> None:
    raise SystemExit


def break_the_claims() -> None:
    right = SqliteQueue.claim

    def claim(self: SqliteQueue, max_tokens: int, reference_version: int = 0) -> list[Claim]:
        if right(self, max_tokens, reference_version):
            raise TypeError("a bug of the queue")
        return []

    SqliteQueue.claim = claim


def load_for_ever() -> None:
    def load(config: object) -> NoReturn:
        print("loading", flush=True)
        while True:
            time.sleep(60)

    frozen_model.load = load


def with_forward(before: Callable[[Sequence[TokenGroup]], None]) -> Callable[[], None]:
    def arrange() -> None:
        frozen_model.choose_forward = lambda model: Odd(model, before)

    return arrange


ODDITIES: dict[str, Callable[[], None]] = {
    "hold": with_forward(hold),
    "lost-device": with_forward(lose_the_device),
    "end-of-thread": with_forward(end_the_thread),
    "broken-claims": break_the_claims,
    "endless-loading": load_for_ever,
}

if __name__ == "__main__":
    ODDITIES[sys.argv.pop(1)]()
    main()
