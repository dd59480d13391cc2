"""What tests of runs on rows share."""

import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from policy_trainer.reporting.metrics import read_metrics


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


def assert_same_run(one: Path, other: Path) -> None:
    """The same weights bit for bit, and the same records of steps."""
    found, expected = weights(one), weights(other)
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
    assert steps_of(one) == steps_of(other)
