"""The trainer's own worker is a process that it restarts; others are only named."""

from pathlib import Path
from typing import Any

import pytest

from policy_trainer.config import TrainConfig
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer import parts
from policy_trainer.trainer.parts import choose_workers
from shared.settings import from_values
from tests.policy_trainer.children import FakeChild


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeChild]:
    """The processes that were made."""
    children: list[FakeChild] = []

    def make(*arguments: Any) -> FakeChild:
        children.append(FakeChild(*arguments))
        return children[-1]

    monkeypatch.setattr(parts, "Child", make)
    return children


def test_the_inline_worker_is_a_process_with_the_token_in_its_environment(
    tmp_path: Path, made: list[FakeChild]
) -> None:
    config = from_values(TrainConfig, model="m", max_steps=1, token="a-secret-token")
    worker = choose_workers(config, "http://127.0.0.1:5", RunDirectory(tmp_path), lambda note: None)
    worker.start()
    (child,) = made
    assert (child.module, child.log) == ("policy_trainer", tmp_path / "logs" / "rollout.log")
    assert child.arguments == ["rollout", "--config", str(tmp_path / "config.toml"), "--server", "http://127.0.0.1:5"]
    assert child.secrets == {"POLICY_TRAINER_TOKEN": "a-secret-token"}
    assert "process 1)" in worker.describe()
    child.die(status=2)
    with pytest.raises(RunFailed, match="the rollout worker died with status 2"):
        worker.check()
    worker.stop()
    assert child.stopped


@pytest.mark.parametrize(
    ("weights", "command"),
    [
        ("directory", "policy-trainer rollout --config {place}/config.toml"),
        ("server", "policy-trainer rollout --server http://gpu1:8400 --run mine"),
    ],
)
def test_external_workers_are_only_named(tmp_path: Path, weights: str, command: str) -> None:
    config = from_values(TrainConfig, model="m", max_steps=1, run="mine", rollout="external", weights=weights)
    external = choose_workers(config, "http://gpu1:8400", RunDirectory(tmp_path), lambda note: None)
    external.start()
    external.check()
    external.delivered()
    external.stop()
    assert f"`{command.format(place=tmp_path)}`" in external.describe()
