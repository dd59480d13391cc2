"""`policy-trainer demo --vision` as a user starts, stops and resumes it."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.cli.demo import vision_model
from policy_trainer.cli.demo.vision_model import cached_vision_model
from shared.models import use_threads
from tests.harness.processes import Process, until
from tests.harness.runs import steps_of


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a base model in its cache that was warmed up for a tenth of the usual time."""
    monkeypatch.setattr(vision_model, "STEPS", 120)
    monkeypatch.setattr(vision_model, "READING_STEPS", 20)
    use_threads(1)
    cached_vision_model(tmp_path / "base_models", 0, lambda done, total: None)
    return tmp_path / "demo"


@pytest.mark.long
def test_it_trains_on_pictures_and_shows_them(run_dir: Path, start: Callable[..., Any]) -> None:
    def demo(*options: str) -> Process:
        command = ("demo", "--vision", "--run-dir", str(run_dir), "--max-steps", "8", *options)
        return start(Process("policy_trainer", *command, log=run_dir.with_suffix(".log")))

    stopped = demo()
    until(lambda: len(steps_of(run_dir)) >= 2, "steps", stopped)
    os.kill(stopped.popen.pid, signal.SIGINT)
    assert stopped.wait() == 130, stopped.output()
    assert "continue with: make demo VISION=1 RESUME=1" in stopped.output()

    resumed = demo("--resume")
    assert resumed.wait() == 0, resumed.output()
    assert [record["step"] for record in steps_of(run_dir)] == list(range(1, 9))
    assert "with blank pictures: 0.0" in " ".join(resumed.output().split())
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["accuracy_blank"] <= 0.05 and summary["accuracy_of_guessing"] < 0.05
    assert (run_dir / "transcripts.html").read_text().count("data:image/png;base64,") == 20
    assert "8 steps are done" in (run_dir / "report.html").read_text()
    assert (run_dir / "model" / "preprocessor_config.json").exists()
