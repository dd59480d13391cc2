"""Trackers: TensorBoard reads what was written, the others get the same numbers, and none of them stops a run.

Modules with the signatures of trackio and W&B replace them.
"""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from policy_trainer.config import TrainConfig
from policy_trainer.reporting.samples import SampledCompletion, SampledGroup
from policy_trainer.reporting.tracking import (
    TRACKERS,
    SafeTracker,
    Trackers,
    refuse_missing,
    scalars,
    start_trackers,
)
from shared.errors import UserError
from shared.settings import from_values

STEP: dict[str, Any] = {
    "kind": "step", "step": 3, "kl": 0.5, "reward/tags": 1, "not_finite": False, "problems": [1, 2], "loss": math.nan,
    "eval_accuracy": None,
}  # fmt: skip
EVALUATION: dict[str, Any] = {
    "kind": "evaluation", "step": 4, "decoding": "greedy", "accuracy": 0.25, "rewards": {"tags": 1.0},
}  # fmt: skip
SAMPLED = SampledGroup(
    3, "train", "b", "t", 7, "6*7=?", "42", (SampledCompletion("41", math.nan, {"accuracy": 0.0}, -0.5, 2, True),)
)
HEALTH = {"kind": "health", "step": 4, "name": "kl", "seen": 2.0, "band": "", "remedy": ""}


def start(name: str, run_dir: Path, first_step: int = 0) -> Any:
    return TRACKERS[name](from_values(TrainConfig, model="m", run="a run", run_dir=run_dir), first_step)


def test_numbers_by_name() -> None:
    assert scalars(STEP) == {"train/kl": 0.5, "train/reward/tags": 1.0, "train/not_finite": 0.0}
    assert scalars(EVALUATION) == {"evaluation/accuracy": 0.25, "evaluation/rewards/tags": 1.0}


def series(directory: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


class TestTensorBoard:
    def test_reads_what_was_written(self, tmp_path: Path) -> None:
        board = start("tensorboard", tmp_path)
        for record in (STEP, EVALUATION, HEALTH, {**STEP, "step": 4, "kl": 0.25}):
            board.write(record)
        board.close()
        assert series(tmp_path, "train/kl") == [(3, 0.5), (4, 0.25)]
        assert series(tmp_path, "evaluation/rewards/tags") == [(4, 1.0)]

    def test_a_resumed_run_hides_the_steps_after_its_checkpoint(self, tmp_path: Path) -> None:
        for first, last, kl in ((0, 6, 1.0), (4, 5, 2.0)):
            board = start("tensorboard", tmp_path, first)
            for step in range(first + 1, last + 1):
                board.write({**STEP, "step": step, "kl": kl})
            board.close()
        assert series(tmp_path, "train/kl") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0)]


class FakeRun:
    """A run of W&B or trackio that keeps what it is given."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.id = options.get("id") or "made-up"
        self.logged: list[tuple[dict[str, float], int | None]] = []
        self.finished = False

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.logged.append((values, step))

    def finish(self, exit_code: int = 0) -> None:
        self.finished, self.exit_code = True, exit_code


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """The runs that were started with fakes of both packages, in order."""
    runs: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        runs.append(FakeRun(options))
        return runs[-1]

    for name in ("wandb", "trackio"):
        module: Any = ModuleType(name)
        module.init = init
        module.Settings = module.Table = SimpleNamespace
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("WANDB_PROJECT", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return runs


class TestWandb:
    def test_gets_settings_numbers_and_samples(self, tmp_path: Path, fakes: list[FakeRun]) -> None:
        tracker = start("wandb", tmp_path)
        for record in (STEP, HEALTH):
            tracker.write(record)
        tracker.write_samples([SAMPLED])
        tracker.close(failed=True)
        (run,) = fakes
        assert run.exit_code == 1
        assert (run.options["project"], run.options["name"], run.options["dir"]) == ("tandem", "a run", tmp_path)
        assert run.options["config"]["loss"]["beta"] == 0.04
        assert run.logged[0] == ({**scalars(STEP), "step": 3}, None) and run.finished
        (logged, _) = run.logged[1]
        table: Any = logged["samples/train"]
        assert logged["step"] == 3
        row = dict(zip(table.columns, table.data[0], strict=True))
        assert (row["prompt"], row["completion"], row["reward"], row["advantage"]) == ("6*7=?", "41", None, -0.5)

    def test_a_resumed_run_is_the_same_run_and_a_new_run_is_another(self, tmp_path: Path, fakes: list[FakeRun]) -> None:
        for first in (0, 5, 0):
            start("wandb", tmp_path, first)
        assert [run.options["id"] for run in fakes] == [None, "made-up", None]


def test_trackio_gets_the_numbers(tmp_path: Path, fakes: list[FakeRun]) -> None:
    for first in (0, 5):
        tracker = start("trackio", tmp_path, first)
        tracker.write(STEP)
        tracker.write(HEALTH)
        tracker.close()
    assert [run.options["resume"] for run in fakes] == ["never", "allow"]
    assert all(run.logged == [(scalars(STEP), 3)] and run.finished for run in fakes)


class Failing:
    def write(self, record: Any) -> None:
        raise ConnectionError("nobody answers")

    def write_samples(self, groups: Any) -> None:
        raise ConnectionError("nobody answers either")

    def close(self, *, failed: bool = False) -> None:
        raise ConnectionError("still nobody")


class TestFailures:
    def test_are_reported_once_and_stop_nothing(self) -> None:
        notes: list[str] = []
        kept: list[Any] = []
        keeping: Any = SimpleNamespace(write=kept.append, close=lambda failed: kept.append(f"closed, failed: {failed}"))
        failing = SafeTracker("wandb", Failing(), notes.append)
        trackers = Trackers([failing, keeping])
        trackers.write(STEP)
        trackers.write(EVALUATION)
        failing.write_samples([SAMPLED])
        trackers.close(failed=True)
        assert kept == [STEP, EVALUATION, "closed, failed: True"]
        assert notes == ["wandb failed; the run continues without it: nobody answers"]

    def test_a_tracker_that_fails_slowly_rests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A library that tries for 240 s would otherwise hold up every step."""
        now, calls = [0.0], []
        monkeypatch.setattr("policy_trainer.reporting.tracking.time.monotonic", lambda: now[0])

        def write(record: Any) -> None:
            calls.append(now[0])
            now[0] += 240
            raise ConnectionError("nobody answers")

        tracker = SafeTracker("mlflow", cast(Any, SimpleNamespace(write=write)), lambda text: None)
        for later in (0.0, 300.0, 2639.0, 2641.0):
            now[0] = later
            tracker.write(STEP)
        assert calls == [0.0, 2641.0]

    def test_a_package_that_is_missing_is_refused_with_the_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        refuse_missing(["tensorboard"])
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"report_to: trackio is not installed; pip install trackio"):
            refuse_missing(["trackio"])

    def test_a_new_run_does_not_start_without_its_trackers(
        self, tmp_path: Path, fakes: list[FakeRun], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(**options: Any) -> FakeRun:
            raise ConnectionError("nobody answers")

        monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
        config = from_values(TrainConfig, model="m", run_dir=tmp_path, report_to=["trackio", "wandb"])
        notes: list[str] = []
        with pytest.raises(UserError, match="report_to: wandb cannot start: nobody answers"):
            start_trackers(config, 0, notes.append)
        assert len(start_trackers(config, 5, notes.append)) == 1  # and one that goes on does so without
        assert notes == ["wandb cannot start; the run continues without it: nobody answers"]


def test_settings_leave_without_secrets(tmp_path: Path, fakes: list[FakeRun]) -> None:
    file = tmp_path / "secret"
    secrets = {"server": "https://somebody:secret@host", "token": "secret", "token_file": file, "tls_ca": file}
    start_trackers(from_values(TrainConfig, model="m", run_dir=tmp_path, report_to=["wandb"], **secrets), 0, print)
    settings = fakes[0].options["config"]
    assert settings["loss"]["beta"] == 0.04 and settings["report_to"] == ["wandb"]
    assert "secret" not in str(settings)
