"""A server that is down, refuses the token, or has another model; and the settings of the one group that is trained."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.config import DoctorConfig, ReferenceConfig, SamplingConfig, TrainConfig
from policy_trainer.trainer.doctor import step_checks
from policy_trainer.trainer.doctor.findings import Subject
from policy_trainer.trainer.doctor.step_checks import one_group, server
from shared.api import ModelInfo
from shared.errors import UserError
from shared.settings import from_values
from tests.harness.ports import free_port
from tests.policy_trainer.trainer.doctor.subjects import looked
from tests.site import Answer


def test_a_server_that_is_down(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_checks, "_PATIENCE_SECONDS", 0.0)
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(
        UserError, match=rf"^server: the reference server at {url} does not answer.*start one with: `ref-server serve"
    ):
        looked(server, model, server=url)


def test_a_token_that_is_refused(model: Path, open_site: Any) -> None:
    error = b'{"error": {"code": "unauthorized", "message": "this token is not known", "request_id": "1"}}'
    site = open_site(lambda request: answer(401, error))
    with pytest.raises(UserError, match=r"^server: .*401: this token is not known; give one .*--token-file"):
        looked(server, model, server=site.url)


def test_another_model(model: Path, open_site: Any) -> None:
    about = dict.fromkeys(ModelInfo.model_fields) | {
        "name": "other", "vocabulary_size": 9999, "tokenizer_fingerprint": "other", "max_batch_tokens": 10000,
        "max_image_bytes": 0,
    }  # fmt: skip
    body = ModelInfo.model_validate(about).model_dump_json().encode()
    results = b'{"results": []}'
    site = open_site(lambda request: answer(200, body if request.path == "/v1/model" else results))
    with pytest.raises(UserError, match=r"^model: the tokenizer of .* is not that of the server's reference other"):
        looked(server, model, server=site.url)


def answer(status: int, body: bytes) -> Answer:
    return Answer(status, body, {"Content-Type": "application/json"})


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
