"""How far an evaluation has come, as lines for those that take long."""

import time
from typing import NamedTuple

from policy_trainer.processes.lifecycle.timing import Patience


class EvaluationProgress(NamedTuple):
    """done: held-out problems that are answered. judged: those of whole batches; within a batch all answers end late,
    so that `done` says nothing about the time left. total: all that were chosen. tokens: of the judged answers."""

    done: int
    judged: int
    total: int
    tokens: int


class EvaluationLines:
    """Of an evaluation that begins now. `line`: once it takes long, then whenever it has taken twice as long."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._patience = Patience()
        self._judged = 0
        self._judged_after = 0.0

    def line(self, progress: EvaluationProgress) -> str | None:
        text, seconds = self.text(progress), self._seconds()
        if progress.done == progress.total or not self._patience.is_over(seconds):
            return None
        return f"evaluating for {seconds:.0f} s: {text}"

    def text(self, progress: EvaluationProgress) -> str:
        """The answered problems, and as soon as a batch is judged tokens a second and the time left."""
        if progress.judged > self._judged:
            self._judged, self._judged_after = progress.judged, self._seconds()
        text = f"{progress.done} of {progress.total} held-out problems"
        if not self._judged_after:
            return text
        left = max(0.0, self._judged_after * progress.total / self._judged - self._seconds())
        return f"{text}, {progress.tokens / self._judged_after:.0f} tokens/s, about {left:.0f} s left"

    def _seconds(self) -> float:
        return time.monotonic() - self._began
