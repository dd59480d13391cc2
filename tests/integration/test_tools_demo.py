"""`policy-trainer demo --tools` as a user starts, stops and resumes it, and the examples of docs/tools.md."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.cli.demo import tool_model
from policy_trainer.cli.demo.tool_model import cached_tool_model
from policy_trainer.config import EvalConfig
from policy_trainer.reporting.samples import read_samples
from policy_trainer.rollout.environments.sessions import Sessions
from shared.models import use_threads
from tests.docs.pages import texts
from tests.harness.processes import Process, until
from tests.harness.runs import steps_of


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a base model in its cache that was warmed up for less than half the usual time, and only with
    calls."""
    monkeypatch.setattr(tool_model, "STEPS", 300)
    monkeypatch.setattr(tool_model, "CALLING_SHARE_AT_END", 1.0)
    use_threads(1)
    cached_tool_model(tmp_path / "base_models", 0, lambda done, total: None)
    return tmp_path / "demo"


@pytest.mark.long
def test_it_trains_with_a_tool_and_shows_its_calls(run_dir: Path, start: Callable[..., Any]) -> None:
    def demo(*options: str) -> Process:
        command = ("demo", "--tools", "--run-dir", str(run_dir), "--max-steps", "8", *options)
        return start(Process("policy_trainer", *command, log=run_dir.with_suffix(".log")))

    stopped = demo()
    until(lambda: len(steps_of(run_dir)) >= 2, "steps", stopped)
    os.kill(stopped.popen.pid, signal.SIGINT)
    assert stopped.wait() == 130, stopped.output()
    assert "continue with: make demo TOOLS=1 RESUME=1" in stopped.output()

    resumed = demo("--resume")
    assert resumed.wait() == 0, resumed.output()
    records = steps_of(run_dir)
    assert [record["step"] for record in records] == list(range(1, 9))
    assert any(record["tools/call_frequency"] > 0 for record in records)
    assert all(record["rollouts/finished"] <= 1 <= record["turns_mean"] for record in records)
    # The tokens of tools are no completion's length.
    assert all(record["completion_length_max"] <= 64 for record in records)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert {"calls_before", "calls_after", "accuracy_before", "accuracy_after"} <= summary.keys()
    assert summary["kl_at_step_0"] < 1e-9
    turns = [item.turns for group in read_samples(run_dir / "samples.jsonl") for item in group.completions]
    assert any(any(call.startswith("multiply ") for turn in each for call in turn.calls) for each in turns)


def test_the_examples_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in texts("tools.md", "python"):
        (tmp_path / text.split()[1]).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings: dict[str, Any] = {"tools": ["my_tools:multiply"], "environment": ["my_game:GuessTheNumber"]}
    with closing(Sessions(EvalConfig(model="m", **settings))) as sessions:
        session = sessions.open("")
        assert session.reset({}, 3) == "Guess my number, 1 to 9."
        assert session.call("multiply", {"a": 6, "b": 7}).content == "42"
        assert session.reward() == 0
        low, high, guesses = 1, 9, 0
        answer = ""
        while answer != "right":
            number, guesses = (low + high) // 2, guesses + 1
            answer = session.call("guess", {"number": number}).content
            low, high = (number + 1, high) if answer == "higher" else (low, number - 1)
        assert session.reward() == 1 - guesses / 10
