"""An interrupted demo can be resumed, but only with its own seed."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.demo.base_model import cached_base_model
from tests.integration.processes import Process, steps_of, until


@pytest.fixture
def demo(base_model: Path, tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts the command on the base model that other tests share, for a demo of seed 1."""

    def make(target: Path, seed: int, on_progress: Any) -> None:
        shutil.copytree(base_model, target)

    monkeypatch.setattr("policy_trainer.demo.base_model.make_base_model", make)
    cached_base_model(tmp_path / "base_models", 1, lambda done, total: None)

    def run(name: str, *options: str) -> Process:
        log = tmp_path / f"{name}.log"
        return start(Process("policy_trainer", "demo", "--run-dir", str(tmp_path / "demo"), *options, log=log))

    return run


@pytest.mark.long
def test_an_interrupted_demo_resumes_only_with_its_own_seed(demo: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    first = demo("first", "--seed", "1", "--max-steps", "1000")
    until(lambda: steps_of(run_dir), "a step", first)
    first.popen.send_signal(signal.SIGINT)
    assert first.wait() == 130, first.output()
    assert "continue with: make demo SEED=1 RESUME=1" in first.output()

    config, done = (run_dir / "config.toml").read_text(), len(steps_of(run_dir))
    other = demo("other", "--resume")
    assert other.wait() == 2, other.output()
    assert "holds a demo of --seed 1, not of 0; continue it with: make demo SEED=1 RESUME=1" in other.output()
    assert (run_dir / "config.toml").read_text() == config

    same = demo("same", "--seed", "1", "--resume", "--max-steps", str(done + 1))
    assert same.wait() == 0, same.output()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["seed"], summary["steps"]) == (1, done + 1)
