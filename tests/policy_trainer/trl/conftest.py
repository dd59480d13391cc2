"""Trainers that are only made start no process."""

import pytest

from policy_trainer.trl import trainer


@pytest.fixture(autouse=True)
def no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "prepare_fork_server", lambda device: None)
