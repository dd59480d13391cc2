"""Runs rewards that may hang or crash: a completion takes at most its time limit, and never stops the run."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from policy_trainer.data.sample import Reward, Sample, Score
from policy_trainer.rewards.sandbox.answers import refusal
from policy_trainer.rewards.sandbox.failures import Failures
from policy_trainer.rewards.sandbox.process import ProcessEnded, SandboxProcess
from policy_trainer.rewards.user_function import UserFunction
from shared.errors import UserError

# Time limit for imports and grammars, before the first judgement; a user's module may be slow to load.
_START_SECONDS = 300.0


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Sandboxed:
    """A reward that runs in the sandbox process, where it may be killed. Both functions must be picklable.

    prepare: slow set-up that must not count towards a completion's time limit. cut_off: the score of a completion for
    which the process ended: the failing score if only the completion can be the cause, else NaN.
    """

    score: Reward | UserFunction
    prepare: Callable[[], object] = _nothing
    cut_off: float = math.nan


class Sandbox:
    """Judges by sandboxed rewards. When a reward fails on a completion, this is logged and counted."""

    def __init__(self, rewards: Mapping[str, Sandboxed], *, seconds: float, memory: int, workers: int = 1) -> None:
        """rewards: by name; if there are none, no process is started. seconds: time limit of one completion and one
        reward. memory: bytes that a process may use, 0 for no limit. workers: processes that judge side by side; all
        but the first start when they are first needed.

        Raises UserError for a reward that cannot be loaded.
        """
        self.failures = Failures(rewards)
        self._lanes = [_Lane(rewards, self.failures, seconds, memory) for _ in range(workers)]
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
            except BaseException:  # the executor waits for its threads: none shall go on judging
                for lane in self._lanes:
                    lane.stop()
                raise
        return scores


class _Lane:
    """One process at a time, and the samples that it judges one after the other."""

    def __init__(self, rewards: Mapping[str, Sandboxed], failures: Failures, seconds: float, memory: int) -> None:
        self._rewards = rewards
        self._failures = failures
        self._seconds = seconds
        self._memory = memory
        self._process: SandboxProcess | None = None
        self._stopped = threading.Event()
        self._loaded = False
        self._together: frozenset[str] = frozenset()

    def judges_together(self, name: str) -> bool:
        """Whether the reward takes many completions in one call."""
        return name in self._together

    def scores(self, name: str, samples: Sequence[Sample]) -> list[Score]:
        self._stopped.clear()
        scores: list[Score] = []
        while len(scores) < len(samples):
            process = self.start()
            try:
                self._judge(process, name, samples[len(scores) :], scores)
            except ProcessEnded as ended:
                if self._stopped.is_set():
                    break
                self._launch()
                size = len(samples) if self.judges_together(name) else 1
                self._failures.add(name, str(ended), count=size)
                scores.extend([self._rewards[name].cut_off] * size)
            except BaseException:  # pending answers would be read as those of later completions
                process.end()
                raise
        return scores

    def stop(self) -> None:
        """Ends the process, and `scores` of another thread with it."""
        self._stopped.set()
        if self._process is not None:
            self._process.end()

    def _judge(self, process: SandboxProcess, name: str, samples: Sequence[Sample], scores: list[Score]) -> None:
        """Appends a score for each sample. Raises ProcessEnded if the process ended on the next judgement."""
        process.send((name, list(samples)), seconds=self._seconds * len(samples))
        size = len(samples) if self.judges_together(name) else 1
        for _ in range(0, len(samples), size):
            answers = process.receive(seconds=self._seconds * size)["answers"]
            if refused := refusal(answers):
                raise UserError(refused)
            scores.extend(answer.get("score", math.nan) for answer in answers)
            self._failures.judged(name, answers)

    def start(self) -> SandboxProcess:
        """A process whose rewards are loaded. Starts one if there is none that lives: it may have been killed while
        idle, when the machine ran out of memory."""
        if self._process is None or not self._process.alive:
            self._launch()
        assert self._process is not None
        if not self._loaded:
            self._load(self._process)
            self._loaded = True
        return self._process

    def _launch(self) -> None:
        self._process = SandboxProcess(memory=self._memory, seconds=self._seconds)
        self._loaded = False

    def _load(self, process: SandboxProcess) -> None:
        """Sends the rewards and waits until they are loaded."""
        scores = {name: reward.score for name, reward in self._rewards.items()}
        try:
            process.send((scores, [reward.prepare for reward in self._rewards.values()]), seconds=_START_SECONDS)
            answer = process.receive(seconds=_START_SECONDS)
        except ProcessEnded as ended:
            raise UserError(f"rewards: loading {', '.join(self._rewards)} {ended}") from None
        if "refused" in answer:
            raise UserError(answer["refused"])
        self._together = frozenset(answer["together"])
