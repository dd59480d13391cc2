"""The one group that the doctor trains has the settings of its run, except for size and place."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.config import DoctorConfig, ReferenceConfig, SamplingConfig, TrainConfig
from policy_trainer.doctor.findings import Subject
from policy_trainer.doctor.step_checks import one_group
from shared.errors import UserError
from shared.settings import from_values


def config_of(run_dir: Path, **settings: Any) -> DoctorConfig:
    return from_values(DoctorConfig, **{"model": "m", "run_dir": run_dir, "device": "cpu", **settings})


def test_it_is_one_step_of_one_group_of_the_run(tmp_path: Path) -> None:
    sampling = SamplingConfig(num_generations=6, prompts_per_round=9, max_resamples=3, temperature=0.7)
    config = config_of(tmp_path / "run", num_train_epochs=2, minibatches=4, sampling=sampling, report_to=["wandb"])
    trial = one_group(config, tmp_path / "trial")
    assert (trial.run_dir, trial.run) == (tmp_path / "trial", "trial")
    assert (trial.max_steps, trial.num_train_epochs, trial.groups_per_step, trial.minibatches) == (1, None, 1, 1)
    assert (trial.sampling.num_generations, trial.sampling.temperature) == (6, 0.7)
    assert (trial.sampling.prompts_per_round, trial.sampling.max_resamples) == (1, 0)
    assert trial.report_to == [] and config.report_to == ["wandb"]
    assert type(trial) is TrainConfig, "a worker reads its config.toml, and ranks its JSON"
    TrainConfig.model_validate(trial.model_dump())


def test_it_leaves_the_reference_of_a_server_of_others_alone(tmp_path: Path) -> None:
    renewed = ReferenceConfig(sync_steps=5, snapshot_root=tmp_path)
    named = config_of(tmp_path / "run", reference=renewed, server="http://gpu:8400")
    assert one_group(named, tmp_path).reference.sync_steps == 0
    assert one_group(config_of(tmp_path / "run", reference=renewed), tmp_path).reference.sync_steps == 5


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    with pytest.raises(UserError, match=r"run_dir: .* cannot be written: Permission denied"):
        _ = Subject(config_of(tmp_path / "run"), ExitStack(), print).directory
