"""`python -m tests.chaos.fake_engine MODEL PORT CALLS`: the fake vLLM in a process of its own, which can be killed.

It writes the paths of its requests down, and takes its time to load weights.
"""

import signal
import sys
import time
from pathlib import Path
from typing import Any

from policy_trainer.cli.demo.base_model import make_tokenizer
from shared.models import load_model, use_threads
from tests.policy_trainer.rollout.sampling.fake_vllm import FakeVllm

_LOADING_SECONDS = 0.2


class _Engine(FakeVllm):
    def _rpc(self, body: dict[str, Any]) -> Any:
        time.sleep(_LOADING_SECONDS)
        return super()._rpc(body)


class _Written(list[str]):
    def __init__(self, file: Path) -> None:
        self._file = file

    def append(self, path: str, /) -> None:
        with self._file.open("a") as file:
            print(path, file=file)


def main() -> None:
    model, port, calls = sys.argv[1:]
    use_threads(1)
    engine = _Engine(
        load_model(model, revision=None, device="cpu", dtype="float32"), make_tokenizer(), model, max_model_len=256,
        port=int(port),
    )  # fmt: skip
    engine.calls = _Written(Path(calls))
    signal.pause()
