"""A dry run has the settings of its run, but for its size and its place."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from policy_trainer.config import ReferenceConfig, SamplingConfig, TrainConfig
from policy_trainer.trainer import dry_run as module
from policy_trainer.trainer.dry_run import dry_run, one_group
from shared.errors import UserError
from shared.settings import from_values


def config_of(run_dir: Path, **settings: Any) -> TrainConfig:
    return from_values(TrainConfig, **{"model": "m", "run_dir": run_dir, "device": "cpu", **settings})


def test_it_is_one_step_of_one_group_of_the_run(tmp_path: Path) -> None:
    sampling = SamplingConfig(num_generations=6, prompts_per_round=9, max_resamples=3, temperature=0.7)
    config = config_of(tmp_path / "run", num_train_epochs=2, minibatches=4, sampling=sampling, report_to=["wandb"])
    trial = one_group(config, tmp_path / "trial")
    assert (trial.run_dir, trial.run) == (tmp_path / "trial", "trial")
    assert (trial.max_steps, trial.num_train_epochs, trial.groups_per_step, trial.minibatches) == (1, None, 1, 1)
    assert (trial.sampling.num_generations, trial.sampling.temperature) == (6, 0.7)
    assert (trial.sampling.prompts_per_round, trial.sampling.max_resamples) == (1, 0)
    assert trial.report_to == [] and config.report_to == ["wandb"]
    TrainConfig.model_validate(trial.model_dump())


def test_it_leaves_the_reference_of_a_server_of_others_alone(tmp_path: Path) -> None:
    renewed = ReferenceConfig(sync_steps=5, snapshot_root=tmp_path)
    named = config_of(tmp_path / "run", reference=renewed, server="http://gpu:8400")
    assert one_group(named, tmp_path).reference.sync_steps == 0
    assert one_group(config_of(tmp_path / "run", reference=renewed), tmp_path).reference.sync_steps == 5


def test_it_leaves_nothing_behind_when_the_run_would_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Path] = []

    def fail(trial: TrainConfig, *_: object) -> None:
        tried.append(trial.run_dir)
        (trial.run_dir / "metrics.jsonl").touch()
        raise UserError("data.path: it is no file")

    monkeypatch.setattr(module, "train", fail)
    with pytest.raises(UserError, match=r"data\.path"):
        dry_run(config_of(tmp_path / "runs" / "mine"), Console(quiet=True))
    assert tried[0].parent == tmp_path, "on the disk that the run will use"
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    with pytest.raises(UserError, match=r"run_dir: .* cannot be written: Permission denied"):
        dry_run(config_of(tmp_path / "run"), Console(quiet=True))
