"""What a run has left in its directory, at any moment of its life."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from policy_trainer.report.settings import RunSettings, read_run_settings
from policy_trainer.reporting.metrics import Metrics, read_metrics
from policy_trainer.reporting.samples import SampledGroup, read_samples
from policy_trainer.run_files.run_directory import RunDirectory
from shared.errors import UserError

# Larger numbers have no place on an axis.
_LARGEST = 1e30


@dataclass(frozen=True)
class RecordedRun:
    """steps, evaluations, warnings: records of metrics.jsonl. groups: of samples.jsonl. progress: the state in the
    newest checkpoint, as JSON; empty without one."""

    root: Path
    name: str
    steps: Sequence[Metrics]
    evaluations: Sequence[Metrics]
    warnings: Sequence[Metrics]
    groups: Sequence[SampledGroup]
    settings: RunSettings
    progress: Mapping[str, Any]

    @property
    def last_step(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0

    def samples_at(self) -> dict[int, float]:
        """Step -> completions that were sampled up to it; empty where no step counts any."""
        counts = [number(record, "completions") for record in self.steps]
        if not any(count > 0 for count in counts):
            return {}
        total = accumulate(0.0 if math.isnan(count) else count for count in counts)
        return {0: 0.0} | dict(zip((record["step"] for record in self.steps), total, strict=True))


def read_run(root: Path) -> RecordedRun:
    """Raises UserError for a directory that holds no run."""
    directory = RunDirectory(root)
    if not directory.config.exists() and not directory.metrics.exists():
        state = "holds no run: it has neither config.toml nor metrics.jsonl" if root.is_dir() else "is no directory"
        raise UserError(f"RUN_DIR: {root} {state}; name the --run-dir of a run")
    try:
        records = [record for record in read_metrics(directory.metrics) if _is_record(record)]
        groups = [group for group in read_samples(directory.samples) if group.step is not None and group.completions]
    except OSError as error:
        raise UserError(f"RUN_DIR: {root} cannot be read: {error.strerror}") from error
    of_kind = {kind: [item for item in records if item["kind"] == kind] for kind in ("step", "evaluation", "health")}
    return RecordedRun(
        root=root,
        name=root.resolve().name,
        steps=of_kind["step"],
        evaluations=of_kind["evaluation"],
        warnings=of_kind["health"],
        groups=groups,
        settings=read_run_settings(directory.config, of_kind["step"]),
        progress=_progress(directory.checkpoints),
    )


def number(record: Mapping[str, Any], name: str) -> float:
    """The metric, NaN where there is none."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else math.nan


def _is_record(record: Any) -> bool:
    return isinstance(record, dict) and isinstance(record.get("step"), int) and "kind" in record


def _progress(checkpoints: Path) -> Mapping[str, Any]:
    """A checkpoint may be removed while it is read."""
    for path in sorted(checkpoints.glob("step-*/trainer.json"), reverse=True):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return {}
