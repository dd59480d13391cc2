"""The trainer's own worker is started again when it dies, with longer and longer pauses; others are only named."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.trainer import workers
from policy_trainer.trainer.workers import ExternalWorkers, InlineWorker


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class FakeChild:
    """A process that runs until `die`. pid: how often it was started."""

    def __init__(self, name: str, module: str, arguments: list[str], log: Path, secrets: dict[str, str]) -> None:
        self.module, self.arguments, self.log, self.secrets = module, arguments, log, secrets
        self.exit_status: int | None = None
        self.pid = 0
        self.stopped = False

    def start(self) -> None:
        self.pid += 1
        self.exit_status = None

    def last_words(self) -> str:
        return "I cannot go on"

    def stop(self) -> None:
        self.stopped = True

    def die(self, status: int = 7) -> None:
        self.exit_status = status


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(workers, "time", made)
    return made


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> FakeChild:
    """The process of the worker, which the fixture `worker` configures."""
    made = FakeChild("", "", [], Path(), {})

    def make(*arguments: Any) -> FakeChild:
        made.__init__(*arguments)
        return made

    monkeypatch.setattr(workers, "Child", make)
    return made


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def worker(tmp_path: Path, child: FakeChild, notes: list[str]) -> InlineWorker:
    made = InlineWorker(tmp_path / "config.toml", tmp_path / "rollout.log", notes.append, SecretStr("a-secret-token"))
    made.start()
    return made


class TestInlineWorker:
    def test_runs_the_command_and_has_the_token_in_its_environment(
        self, worker: InlineWorker, child: FakeChild, tmp_path: Path
    ) -> None:
        assert (child.module, child.arguments) == (
            "policy_trainer",
            ["rollout", "--config", str(tmp_path / "config.toml")],
        )
        assert child.secrets == {"POLICY_TRAINER_TOKEN": "a-secret-token"}
        worker.stop()
        assert child.stopped

    def test_is_left_alone_while_it_runs(self, worker: InlineWorker, child: FakeChild, notes: list[str]) -> None:
        worker.check()
        assert child.pid == 1 and not notes
        assert "process 1)" in worker.describe()

    def test_is_given_up_when_it_always_dies(
        self, worker: InlineWorker, child: FakeChild, notes: list[str], clock: Clock
    ) -> None:
        for death, pause in enumerate([1, 2, 4, 8], 1):
            child.die()
            worker.check()
            assert len(notes) == death
            assert "status 7" in notes[-1] and "I cannot go on" in notes[-1]
            clock.now += pause - 0.01
            worker.check()
            assert child.pid == death and len(notes) == death, "it is noted once, and rests"
            clock.now += 0.02
            worker.check()
            assert child.pid == death + 1, "it is started again"
        child.die()
        with pytest.raises(RunFailed, match=r"(?s)I cannot go on.*died 5 times without delivering a batch"):
            worker.check()

    def test_deaths_are_counted_anew_after_a_batch(
        self, worker: InlineWorker, child: FakeChild, notes: list[str], clock: Clock
    ) -> None:
        for _ in range(7):
            child.die()
            worker.check()
            clock.now += 1.01
            worker.check()
            worker.delivered()
        assert len(notes) == 7

    def test_that_refuses_its_settings_is_not_started_again(self, worker: InlineWorker, child: FakeChild) -> None:
        child.die(status=2)
        with pytest.raises(RunFailed, match=r"(?s)status 2.*I cannot go on"):
            worker.check()


def test_external_workers_are_only_named(tmp_path: Path) -> None:
    external = ExternalWorkers(tmp_path / "config.toml")
    external.start()
    external.check()
    external.delivered()
    external.stop()
    assert f"policy-trainer rollout --config {tmp_path / 'config.toml'}" in external.describe()
