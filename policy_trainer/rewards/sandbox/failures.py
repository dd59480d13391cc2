"""Counts and logs the completions that sandboxed rewards failed on."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import structlog

from shared.errors import UserError

log = structlog.get_logger()

# If a reward fails on each of this many first completions, in as many calls, the reward is at fault, not a completion.
_MAX_FAILURES = 64
_MAX_FAILED_CALLS = 3


class Failures:
    """Failures by reward. Lanes of a sandbox share it, each with a thread of its own."""

    def __init__(self, names: Iterable[str]) -> None:
        self.counts = dict.fromkeys(names, 0)
        self._judged = dict.fromkeys(self.counts, 0)
        self._calls = dict.fromkeys(self.counts, 0)
        self._told: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def judged(self, name: str, answers: Sequence[Mapping[str, Any]]) -> None:
        """Counts the answers of one call. Raises UserError for a reward that has failed in every call so far."""
        errors = [answer for answer in answers if "error" in answer]
        with self._lock:
            self._count(name, len(answers), len(errors))
            for answer in errors:  # the same error on many completions is told once
                if (name, answer["kind"]) not in self._told:
                    self._told.add((name, answer["kind"]))
                    _log(name, self.counts[name], exception=answer["error"])
            if errors:
                self._refuse_if_hopeless(name, errors[-1]["error"])

    def add(self, name: str, reason: str, *, count: int) -> None:
        """Counts a call on `count` completions in which the process ended, and logs it always."""
        with self._lock:
            self._count(name, count, count)
            lost = {"completions": count} if count > 1 else {}
            _log(name, self.counts[name], reason=reason, **lost)
            self._refuse_if_hopeless(name, reason)

    def _count(self, name: str, judged: int, failed: int) -> None:
        self._judged[name] += judged
        self._calls[name] += 1
        self.counts[name] += failed

    def _refuse_if_hopeless(self, name: str, reason: str) -> None:
        failed = self.counts[name]
        if failed == self._judged[name] >= _MAX_FAILURES and self._calls[name] >= _MAX_FAILED_CALLS:
            last = reason.strip().split("\n")[-1]
            raise UserError(f"rewards: {name} failed on each of the first {failed} completions; the last error: {last}")


def _log(name: str, failures: int, **told: Any) -> None:
    log.warning("a completion could not be judged", reward=name, failures=failures, **told)
