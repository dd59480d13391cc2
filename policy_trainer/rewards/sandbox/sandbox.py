"""Runs rewards that may hang or crash: a completion takes at most its time limit, and never stops the run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from policy_trainer.data.sample import Reward, Sample
from policy_trainer.rewards.sandbox.process import ProcessEnded, SandboxProcess
from shared.errors import UserError

log = structlog.get_logger()

# Time limit for imports and grammars, before the first judgement; a user's module may be slow to load.
_START_SECONDS = 300.0
# If a reward fails on each of this many first completions, the reward is at fault, not the completions.
_MAX_FAILURES = 64


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Sandboxed:
    """A reward that runs in the sandbox process, where it may be killed. Both functions must be picklable.

    prepare: slow set-up that must not count towards a completion's time limit. cut_off: the score of a completion for
    which the process ended: the failing score if only the completion can be the cause, else NaN.
    """

    score: Reward
    prepare: Callable[[], object] = _nothing
    cut_off: float = math.nan


class Sandbox:
    """Judges by sandboxed rewards. When a reward fails on a completion, this is logged and counted."""

    def __init__(self, rewards: Mapping[str, Sandboxed], *, seconds: float, memory: int) -> None:
        """rewards: by name; if there are none, no process is started. seconds: time limit of one completion and one
        reward. memory: bytes that the process may use, 0 for no limit.

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
        """One score for each sample. Raises UserError for a reward that has failed on every completion so far."""
        scores: list[float] = []
        while len(scores) < len(samples):
            if not self._process.alive:  # it may have been killed while idle, when the machine ran out of memory
                self._start()
            self._await_start()
            try:
                self._judge(name, samples[len(scores) :], scores)
            except ProcessEnded as ended:
                self._start()
                scores.append(self._failed(name, str(ended), self._rewards[name].cut_off))
            except BaseException:  # pending answers would be read as those of later completions
                self._process.end()
                raise
        return scores

    def _judge(self, name: str, samples: Sequence[Sample], scores: list[float]) -> None:
        """Appends a score for each sample. Raises ProcessEnded if the process ended on the next one."""
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
        _log_failure(name, reason, self.failures[name])
        if self.failures[name] == self._judged[name] >= _MAX_FAILURES:
            raise UserError(
                f"rewards: {name} failed on each of the first {_MAX_FAILURES} completions; the last error: {reason}"
            )
        return score

    def _start(self) -> None:
        self._process = SandboxProcess(memory=self._memory, seconds=self._seconds)
        self._started = False

    def _await_start(self) -> None:
        """Sends the rewards and waits until they are loaded."""
        if self._started:
            return
        scores = {name: reward.score for name, reward in self._rewards.items()}
        try:
            self._process.send((scores, [reward.prepare for reward in self._rewards.values()]), seconds=_START_SECONDS)
            answer = self._process.receive(seconds=_START_SECONDS)
        except ProcessEnded as ended:
            raise UserError(f"rewards: loading {', '.join(self._rewards)} {ended}") from None
        if "refused" in answer:
            raise UserError(answer["refused"])
        self._started = True


def _log_failure(name: str, reason: str, failures: int) -> None:
    """Logs a failure. Only the first traceback is logged, since later ones are most likely the same; the end of a
    process is always logged."""
    *traceback, last = reason.strip().split("\n")
    if not traceback:
        log.warning("a completion could not be judged", reward=name, failures=failures, reason=last)
    elif failures == 1:
        log.warning("a completion could not be judged", reward=name, failures=failures, exception=reason)
