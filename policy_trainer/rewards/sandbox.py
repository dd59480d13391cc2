"""Runs rewards that may hang or crash: a completion takes at most its time limit, and never stops the run."""

import math
import pickle
import threading
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from policy_trainer.data.problem import Reward, Sample, Score
from policy_trainer.processes.messages import ProcessEnded
from policy_trainer.processes.user_process import UserProcess
from policy_trainer.rewards.call_log import CallLogs
from policy_trainer.rewards.failures import Failures, too_slow
from shared.errors import UserError

# Time limit for imports and grammars, before the first judgement; a user's module may be slow to load.
_START_SECONDS = 300.0
# Samples of one request, if each is a call, and characters of a request with several. Reading it counts towards the
# first one's time limit and the memory limit, and what is not answered is sent again.
_AT_ONCE, _AT_ONCE_CHARACTERS = 64, 2**20
_CHILD = "policy_trainer.rewards.sandbox_child"


@dataclass(frozen=True)
class Sandboxed:
    """A reward that runs in the sandbox process, where it may be killed. All of it must be picklable.

    score: one of our rules, or a user's function, `module:function`, which the process imports. prepare: slow set-up
    that must not count towards a completion's time limit. cut_off: the score of a completion for which the process
    ended: the failing score if only the completion can be the cause, else NaN.
    """

    score: Reward | str
    prepare: Callable[[], object] | None = None
    cut_off: float = math.nan


class Sandbox:
    """Judges by sandboxed rewards. When a reward fails on a completion, this is logged and counted."""

    def __init__(self, rewards: Mapping[str, Sandboxed], *, seconds: float, memory: int, workers: int = 1) -> None:
        """rewards: by name; if there are none, no process is started. seconds: time limit of one completion and one
        reward. memory: bytes that a process may use, 0 for no limit. workers: processes that judge in parallel; all but
        the first start when they are first needed.

        Raises UserError for a reward that cannot be loaded.
        """
        self.failures = Failures(rewards)
        self.logs = CallLogs()
        self._lanes = [_Lane(rewards, self.failures, self.logs, seconds, memory) for _ in range(workers)]
        if rewards:
            self._lanes[0].start()

    def scores(self, name: str, samples: Sequence[Sample]) -> list[Score]:
        """One score for each sample. Raises UserError for a reward that has failed on every completion so far."""
        workers = 1 if self._lanes[0].judges_together(name) else min(len(self._lanes), len(samples))
        if workers < 2:
            return self._lanes[0].scores(name, samples)
        scores: list[Score] = [math.nan] * len(samples)
        with ThreadPoolExecutor(workers, thread_name_prefix="sandbox") as threads:
            shares = [
                threads.submit(lane.scores, name, samples[k::workers]) for k, lane in enumerate(self._lanes[:workers])
            ]
            try:
                for k, share in enumerate(shares):
                    scores[k::workers] = share.result()
            except BaseException:  # the executor waits for its threads: none shall continue judging
                for lane in self._lanes:
                    lane.stop()
                raise
        return scores


class _Lane:
    """One process at a time, and the samples that it judges one after the other."""

    def __init__(
        self, rewards: Mapping[str, Sandboxed], failures: Failures, logs: CallLogs, seconds: float, memory: int
    ) -> None:
        self._rewards = rewards
        self._failures = failures
        self._logs = logs
        self._seconds = seconds
        self._memory = memory
        self._process: UserProcess | None = None
        self._stopped = threading.Event()
        self._together: frozenset[str] = frozenset()

    def judges_together(self, name: str) -> bool:
        """Whether the reward takes many completions in one call."""
        return name in self._together

    def scores(self, name: str, samples: Sequence[Sample]) -> list[Score]:
        self._stopped.clear()
        scores: list[Score] = []
        while len(scores) < len(samples):
            process = self.start()
            together = self.judges_together(name)
            count = len(samples) - len(scores) if together else _AT_ONCE
            sent, pickled = _request(samples[len(scores) :][:count], divisible=not together)
            size = len(sent) if together else 1
            calls = process.ask_each("judge", self._seconds * size, len(sent) // size, reward=name, pickled=pickled)
            try:
                with closing(calls):  # pending answers end the process
                    for answered in calls:
                        self._logs.add(samples[len(scores) : len(scores) + size], answered["answers"])
                        scores.extend(self._failures.scores(name, answered["answers"]))
            except ProcessEnded as ended:
                if self._stopped.is_set():
                    break
                reason = too_slow(self._seconds, size) if ended.too_slow else str(ended)
                self._failures.lost(name, reason, count=size)
                scores.extend([self._rewards[name].cut_off] * size)
        return scores

    def stop(self) -> None:
        """Ends the process, and `scores` of another thread with it."""
        self._stopped.set()
        if self._process is not None:
            self._process.end()

    def start(self) -> UserProcess:
        """A process whose rewards are loaded. Starts one if none is alive: it may have been killed while idle, when the
        machine ran out of memory."""
        if self._process is None or not self._process.alive:
            self._process = UserProcess(_CHILD, memory=self._memory)
            try:
                self._load(self._process)
            except BaseException:  # a process that has not loaded them must not be used
                self._process.end()
                raise
        return self._process

    def _load(self, process: UserProcess) -> None:
        """Sends the rewards and waits until they are loaded."""
        scores = {name: reward.score for name, reward in self._rewards.items()}
        preparations = [reward.prepare for reward in self._rewards.values() if reward.prepare]
        try:
            answer = process.ask("load", _START_SECONDS, pickled=_pickled((scores, preparations)))
        except ProcessEnded as ended:
            raise UserError(f"rewards: loading {', '.join(self._rewards)} {ended}") from None
        if "refused" in answer:
            raise UserError(*answer["refused"])
        self._together = frozenset(answer["together"])


def _request(samples: Sequence[Sample], *, divisible: bool) -> tuple[Sequence[Sample], str]:
    """The samples, or as many of the first ones as make no large request, and their pickle."""
    count = 1 if divisible else len(samples)
    pickled = _pickled(samples[:count])
    while count < len(samples) and len(more := _pickled(samples[: 2 * count])) <= _AT_ONCE_CHARACTERS:
        count, pickled = min(2 * count, len(samples)), more
    return samples[:count], pickled


def _pickled(value: object) -> str:
    """For the process, which gets it from nobody else."""
    return b64encode(pickle.dumps(value)).decode()
