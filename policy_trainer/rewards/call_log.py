"""What reward functions log by `log_metric` and `log_extra`, as TRL's do: by completion, since groups are split."""

import math
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policy_trainer.data.problem import Sample

# In the answer for a completion, next to its score.
KEY = "logged"


@dataclass(frozen=True)
class Logged:
    """What rewards logged about one completion. metrics: of the calls that judged it, by name. extras: JSON values by
    column."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)

    def with_later(self, later: "Logged") -> "Logged":
        """Both; of the same name, the later one's."""
        return Logged({**self.metrics, **later.metrics}, {**self.extras, **later.extras})


class CallLog:
    """Arguments `log_metric` and `log_extra` of one call, and what it logged. completions: how many the call judges."""

    def __init__(self, completions: int) -> None:
        self._completions = completions
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._extras: dict[str, list[Any]] = {}

    @property
    def arguments(self) -> dict[str, Any]:
        return {"log_metric": self.log_metric, "log_extra": self.log_extra}

    def log_metric(self, name: str, value: float) -> None:
        """A number of this call. A step's metric `logged/NAME` is the mean; values that are not finite are left out."""
        if math.isfinite(number := float(value)):
            self._metrics[str(name)].append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """A column of samples.jsonl: a value for each completion. Raises ValueError for another number of values."""
        column_values = [_json(value) for value in values]
        if (got := len(column_values)) != self._completions:
            raise ValueError(f"log_extra: {column} needs {self._completions} values, one a completion; got {got}")
        self._extras[str(column)] = column_values

    def of(self, place: int) -> dict[str, Any]:
        """For the answer of the completion at this place of the call; empty where nothing was logged."""
        means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        extras = {column: values[place] for column, values in self._extras.items()}
        return {KEY: {"metrics": means, "extras": extras}} if means or extras else {}


def _json(value: Any) -> Any:
    """A number, a truth value, a text or None; anything else as text."""
    value = value.item() if getattr(value, "shape", None) == () else value  # numpy's and torch's numbers
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


class CallLogs:
    """What was logged about samples that are being judged, until it is taken. Threads may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: dict[int, Logged] = {}  # by id: samples cannot be hashed, and live until theirs is taken

    def add(self, samples: Sequence[Sample], answers: Sequence[Mapping[str, Any]]) -> None:
        """answers: one for each of the samples, perhaps with what was logged."""
        with self._lock:
            for sample, answer in zip(samples, answers, strict=False):
                if logged := answer.get(KEY):
                    self._logged[id(sample)] = self._logged.get(id(sample), Logged()).with_later(Logged(**logged))

    def take(self, samples: Sequence[Sample]) -> list[Logged]:
        """Of each sample; nothing is kept."""
        with self._lock:
            taken = [self._logged.get(id(sample), Logged()) for sample in samples]
            self._logged.clear()
        return taken
