"""Helpers of tests of runs on rows."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from policy_trainer.reporting.metrics import read_metrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def stop_after(steps: int, learner: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes during this step, counted from now."""
    step, taken = learner.step, []  # type: ignore[attr-defined]

    def counted(*args: Any, **kwargs: Any) -> Any:
        taken.append(step(*args, **kwargs))
        if len(taken) == steps:
            signal.raise_signal(signal.SIGINT)
        return taken[-1]

    monkeypatch.setattr(learner, "step", counted)


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run_dir / "model" / "model.safetensors")


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run_dir / "metrics.jsonl") if record["kind"] == "step"]


def documented(kind: str) -> set[str]:
    """The metrics of this kind of record that the page names."""
    rows = re.findall(r"^\| ([\w -]+) \| `([^`]+)` \| ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name for of, name in rows if of in (kind, "all")}


def assert_same_run(first: Path, other: Path) -> None:
    """The same weights bit for bit, and the same records of steps."""
    actual, expected = weights(first), weights(other)
    assert all(torch.equal(weight, actual[name]) for name, weight in expected.items())
    assert steps_of(first) == steps_of(other)
