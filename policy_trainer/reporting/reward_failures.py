"""Reports on which completions rewards failed, from what workers send with their batches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from policy_trainer.reporting.metrics import sample_fields
from policy_trainer.rewards.failures import RewardsFailed, summary
from shared.batch import Batch
from shared.errors import printable

# In a batch's `sample`: {reward: {"completions": n, "error": text}}.
KEY = "reward_failures"
# A `sample` is limited in size.
_MOST_REWARDS, _MOST_CHARACTERS = 3, 200
# Of a run: clients may invent names.
_MOST_NAMES = 64
# Of a round; a sum of larger numbers may be too long to print.
_MOST_COMPLETIONS = 10**12


def reported(failures: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
    """Failures of a round, for the `sample` of its first batch. failures: (completions, first error) by reward."""
    entries = {
        name: {"completions": count, "error": ascii(summary(error))[1:-1][:_MOST_CHARACTERS]}
        for name, (count, error) in list(failures.items())[:_MOST_REWARDS]
    }
    return {KEY: entries} if entries else {}


@dataclass
class RewardFailures:
    """Counts the failures of a run. after: number of steps after which the run ends if there was no reward at all."""

    after: int
    _counts: dict[str, int] = field(default_factory=dict, init=False)
    _errors: dict[str, str] = field(default_factory=dict, init=False)
    _noted: dict[str, int] = field(default_factory=dict, init=False)
    _completions: int = field(default=0, init=False)
    _rewarded: bool = field(default=False, init=False)

    def observe(self, batches: Sequence[Batch]) -> list[str]:
        """A sentence for each reward that has failed for the first time. Raises RewardsFailed if the first steps have
        no reward at all, and one is known to have failed."""
        for batch in batches:
            self._rewarded |= not np.isnan(batch.rewards).all()
            self._completions += len(batch.rewards)
            for name, count, error in _read(batch):
                if name not in self._counts and len(self._counts) == _MOST_NAMES:
                    continue
                self._counts[name] = self._counts.get(name, 0) + count
                self._errors.setdefault(name, error)
        self.after -= 1
        if self.after == 0 and not self._rewarded and self._errors:
            name, error = next(iter(self._errors.items()))
            raise RewardsFailed(name, f"the first {self._completions} completions", error)
        return self._sentences(name for name in self._counts if name not in self._noted)

    def summary(self) -> list[str]:
        """A sentence for each reward that has failed again since `observe` reported it."""
        return self._sentences(name for name, count in self._counts.items() if count > self._noted[name])

    def _sentences(self, names: Iterator[str]) -> list[str]:
        new = list(names)
        self._noted |= {name: self._counts[name] for name in new}
        return [
            f"{name} failed on {self._counts[name]} completions so far; the first error: {self._errors[name]}"
            for name in new
        ]


def _read(batch: Batch) -> Iterator[tuple[str, int, str]]:
    """(reward, completions, error)."""
    entries = sample_fields(batch).get(KEY)
    for name, item in entries.items() if isinstance(entries, dict) else ():
        count, error = (item.get("completions"), item.get("error")) if isinstance(item, dict) else (None, None)
        if isinstance(count, int) and 0 < count <= _MOST_COMPLETIONS and isinstance(error, str):
            yield printable(name, keep="\n"), count, printable(error[:_MOST_CHARACTERS], keep="\n")
