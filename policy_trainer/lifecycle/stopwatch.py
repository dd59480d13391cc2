"""How long the stages of a run take in all."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """seconds: by stage, in the order of their beginnings.

    ```
    with stopwatch("learn"):
        learner.step(batches)
    ```
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Adds the seconds of the block to its stage, also when it raises."""
        self.seconds.setdefault(stage, 0.0)
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] += time.monotonic() - began
