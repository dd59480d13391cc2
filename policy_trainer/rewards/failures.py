"""The answers of rewards, wherever they ran: their scores, and counts and logs of failures."""

import math
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import structlog

from policy_trainer.data.problem import Score
from policy_trainer.processes.lifecycle.endings import RunFailed
from shared.errors import UserError

log = structlog.get_logger()

# If a reward fails on each of this many first completions, in as many calls, the reward is at fault, not a completion.
_MAX_FAILURES = 64
_MAX_FAILED_CALLS = 3
# A file and line in a traceback.
_PLACE = re.compile(r'File "(.+)", line (\d+)')
_TOO_SLOW = "took more than"


class RewardsFailed(UserError, RunFailed):
    """A reward failed on every completion, so that the run cannot continue. Its cause has the first traceback."""

    def __init__(self, name: str, completions: str, error: str) -> None:
        """completions: which ones, in words. error: the traceback of the first failure, or its reason."""
        slow = error.startswith(_TOO_SLOW)
        remedy = "raise judging.seconds, or make the reward faster" if slow else "fix the reward, or name other rewards"
        super().__init__(f"rewards: {name} failed on {completions}: {summary(error)}", remedy)
        self.__cause__ = RuntimeError(error)


def summary(error: str) -> str:
    """The last line of a traceback, with its innermost file and line; a reason without a traceback as it is."""
    places = _PLACE.findall(error)
    last = error.strip().split("\n")[-1]
    return f"{last} ({':'.join(places[-1])})" if places else last


def too_slow(seconds: float, completions: int) -> str:
    """The reason for a call that was given up. seconds: judging.seconds, the limit for each of its completions."""
    if completions == 1:
        return f"{_TOO_SLOW} {seconds:g} s (judging.seconds)"
    return (
        f"{_TOO_SLOW} {seconds * completions:g} s (judging.seconds = {seconds:g} for each of {completions} completions)"
    )


class Failures:
    """Failures by reward. Lanes of a sandbox share it, each with a thread of its own."""

    def __init__(self, names: Iterable[str]) -> None:
        self.counts = dict.fromkeys(names, 0)
        self.errors: dict[str, str] = {}  # the first of each reward: a traceback, or a reason
        self._judged = dict.fromkeys(self.counts, 0)
        self._failed = dict.fromkeys(self.counts, 0)
        self._calls = dict.fromkeys(self.counts, 0)
        self._logged: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def scores(self, name: str, answers: Sequence[Mapping[str, Any]]) -> list[Score]:
        """The scores in the answers of one call, NaN for each failure, which is counted.

        Raises UserError for a reward that cannot be used, RewardsFailed for one that has failed in every call.
        """
        if refused := next((answer["refused"] for answer in answers if "refused" in answer), None):
            raise UserError(*refused)
        errors = [answer for answer in answers if "error" in answer]
        with self._lock:
            self._count(name, len(answers), len(errors))
            for answer in errors:  # the same error on many completions is logged once
                if (name, answer["kind"]) not in self._logged:
                    self._logged.add((name, answer["kind"]))
                    _log(name, self.counts[name], exception=answer["error"])
            if errors:
                self._keep_error(name, errors[0]["error"])
        return [answer.get("score", math.nan) for answer in answers]

    def lost(self, name: str, reason: str, *, count: int, at_fault: bool = True) -> None:
        """Counts and logs a call on `count` completions that was given up, or in which the process ended.

        at_fault: whether that says something about the reward, which has failed if it never gives a score.
        """
        with self._lock:
            if at_fault:
                self._count(name, count, count)
            else:
                self.counts[name] += count
            size = {"completions": count} if count > 1 else {}
            _log(name, self.counts[name], reason=reason, **size)
            self._keep_error(name, reason)

    def _count(self, name: str, judged: int, failed: int) -> None:
        self._judged[name] += judged
        self._calls[name] += 1
        self._failed[name] += failed
        self.counts[name] += failed

    def _keep_error(self, name: str, error: str) -> None:
        first = self.errors.setdefault(name, error)
        failed = self._failed[name]
        if failed == self._judged[name] >= _MAX_FAILURES and self._calls[name] >= _MAX_FAILED_CALLS:
            raise RewardsFailed(name, f"each of the first {failed} completions", first)


def _log(name: str, failures: int, **details: Any) -> None:
    log.warning("a completion could not be judged", reward=name, failures=failures, **details)
