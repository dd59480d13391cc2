"""Rewards that may hang or crash: each completion costs at most its time limit, and never the run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from policy_trainer.data.sample import Reward, Sample
from policy_trainer.rewards.sandbox.process import ProcessEnded, SandboxProcess
from shared.errors import UserError

log = structlog.get_logger()

# Imports and grammars are loaded before time is taken; the user's own may be large.
_START_SECONDS = 300.0
# A reward that fails on all of so many completions is at fault, and not the completions.
_HOPELESS = 64


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Sandboxed:
    """A reward that is judged in a process of its own: it may be killed. Both functions can be pickled.

    prepare: what is not to count against a completion's time. cut_off: what a completion gets over which judging had to
    be ended: the failing score where only the completion can be the cause, else NaN.
    """

    score: Reward
    prepare: Callable[[], object] = _nothing
    cut_off: float = math.nan


class Sandbox:
    """Judges by such rewards. Where one fails on a completion, that is logged and counted."""

    def __init__(self, rewards: Mapping[str, Sandboxed], *, seconds: float, memory: int) -> None:
        """rewards: where there are none, there is no process. seconds: of one completion and one reward. memory: bytes
        of the process, 0 for any number.

        Raises UserError for a reward that cannot be loaded.
        """
        self._rewards = rewards
        self._seconds = seconds
        self._memory = memory
        self._judged = dict.fromkeys(rewards, 0)
        self.failures = dict.fromkeys(rewards, 0)
        if rewards:
            self._start()
            self._await_start()

    def scores(self, name: str, samples: Sequence[Sample]) -> list[float]:
        """One for each sample. Raises UserError for a reward that does nothing but fail."""
        scores: list[float] = []
        while len(scores) < len(samples):
            if not self._process.alive:  # it may have ended while it had nothing to do, for lack of memory
                self._start()
            self._await_start()
            try:
                self._judge(name, samples[len(scores) :], scores)
            except ProcessEnded as gone:
                self._start()
                scores.append(self._failed(name, str(gone), self._rewards[name].cut_off))
            except BaseException:  # its answers would be taken for those of other completions
                self._process.end()
                raise
        return scores

    def _judge(self, name: str, samples: Sequence[Sample], scores: list[float]) -> None:
        """Adds a score for each. Raises ProcessEnded when judging the next one ended the process."""
        self._process.send((name, list(samples)), seconds=self._seconds)
        for _ in samples:
            answer = self._process.receive(seconds=self._seconds)
            if "refused" in answer:
                raise UserError(answer["refused"])
            if "score" in answer:
                self._judged[name] += 1
                scores.append(answer["score"])
            else:
                scores.append(self._failed(name, answer["error"], math.nan))

    def _failed(self, name: str, reason: str, score: float) -> float:
        """The score of a completion that could not be judged."""
        self._judged[name] += 1
        self.failures[name] += 1
        _tell(name, reason, self.failures[name])
        if self.failures[name] == self._judged[name] >= _HOPELESS:
            raise UserError(
                f"rewards: {name} failed on each of the first {_HOPELESS} completions, at last so: {reason}"
            )
        return score

    def _start(self) -> None:
        self._process = SandboxProcess(memory=self._memory, seconds=self._seconds)
        self._started = False

    def _await_start(self) -> None:
        """Hands the rewards over, and waits until they are loaded."""
        if self._started:
            return
        scores = {name: reward.score for name, reward in self._rewards.items()}
        try:
            self._process.send((scores, [reward.prepare for reward in self._rewards.values()]), seconds=_START_SECONDS)
            answer = self._process.receive(seconds=_START_SECONDS)
        except ProcessEnded as gone:
            raise UserError(f"rewards: loading {', '.join(self._rewards)} {gone}") from None
        if "refused" in answer:
            raise UserError(answer["refused"])
        self._started = True


def _tell(name: str, reason: str, failures: int) -> None:
    """A traceback is told once: the next ones are most likely the same. What cost a process is always told."""
    *traceback, last = reason.strip().split("\n")
    if not traceback:
        log.warning("a completion could not be judged", reward=name, failures=failures, reason=last)
    elif failures == 1:
        log.warning("a completion could not be judged", reward=name, failures=failures, exception=reason)
