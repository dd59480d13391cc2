"""Processes of the trainer's own: their last words, their end, and the worker that is started again."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.lifecycle.processes import Child
from policy_trainer.trainer import workers
from policy_trainer.trainer.workers import ExternalWorkers, InlineWorker

OpenChild = Callable[..., Child]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes a module that a child can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)

    return write


@pytest.fixture
def open_child(tmp_path: Path) -> Iterator[OpenChild]:
    children: list[Child] = []

    def make(module: str, *arguments: str) -> Child:
        children.append(Child("child", module, arguments, tmp_path / "logs" / "child.log"))
        return children[-1]

    yield make
    for child in children:
        child.stop()


def eventually(true: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until, "it has not come true within twenty seconds"
        time.sleep(0.02)


SLEEPS = "import time\nprint('up', flush=True)\ntime.sleep(60)\n"
STUBBORN = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)\n"
)


class TestChild:
    def test_output_and_status(self, modules: Callable[[str, str], None], open_child: OpenChild) -> None:
        modules("talks", "import sys\nprint(sys.argv[1:])\nprint('late', file=sys.stderr)\nsys.exit(3)\n")
        child = open_child("talks", "a", "b c")
        assert child.pid is None and child.exit_status is None
        child.start()
        eventually(lambda: child.exit_status is not None)
        assert child.exit_status == 3
        assert sorted(child.last_words().splitlines()) == ["['a', 'b c']", "late"]

    def test_last_words_are_the_last(self, modules: Callable[[str, str], None], open_child: OpenChild) -> None:
        modules("talks", "import sys\nsys.stdout.buffer.write(b'\\xff\\n')\nfor i in range(100): print(i)\n")
        child = open_child("talks")
        child.start()
        eventually(lambda: child.exit_status is not None)
        assert child.last_words().splitlines()[-1] == "99" and len(child.last_words().splitlines()) == 12

    def test_stop_ends_it(self, modules: Callable[[str, str], None], open_child: OpenChild) -> None:
        modules("sleeps", SLEEPS)
        child = open_child("sleeps")
        child.start()
        eventually(lambda: child.last_words() == "up")
        assert child.exit_status is None and child.pid
        os.kill(child.pid, 0)
        child.stop()
        assert child.exit_status == -signal.SIGTERM
        child.stop()

    def test_one_that_will_not_end_is_killed(
        self, modules: Callable[[str, str], None], open_child: OpenChild, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("policy_trainer.lifecycle.processes._STOP_SECONDS", 0.2)
        modules("stubborn", STUBBORN)
        child = open_child("stubborn")
        child.start()
        eventually(lambda: child.last_words() == "up")
        child.stop()
        assert child.exit_status == -signal.SIGKILL

    def test_ctrl_c_reaches_the_parent_alone(self, modules: Callable[[str, str], None], open_child: OpenChild) -> None:
        modules("sleeps", SLEEPS)
        child = open_child("sleeps")
        child.start()
        assert child.pid is not None and os.getpgid(child.pid) != os.getpgid(0)


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(workers, "time", made)
    return made


class TestInlineWorker:
    @pytest.fixture
    def notes(self) -> list[str]:
        return []

    @pytest.fixture
    def worker(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: Callable[[str, str], None], notes: list[str]
    ) -> Iterator[InlineWorker]:
        """Runs the module `fake` in place of the trainer's own."""

        def child(name: str, module: str, arguments: list[str], log: Path, secrets: dict[str, str]) -> Child:
            assert (module, arguments) == ("policy_trainer", ["rollout", "--config", str(tmp_path / "config.toml")])
            return Child(name, "fake", arguments, log, secrets)

        monkeypatch.setattr(workers, "Child", child)
        modules("fake", "import sys\nprint('I cannot go on')\nsys.exit(7)\n")
        made = InlineWorker(
            tmp_path / "config.toml", tmp_path / "rollout.log", notes.append, SecretStr("a-secret-token")
        )
        yield made
        made.stop()

    def test_it_gets_the_token_by_environment_and_no_other_setting(
        self,
        worker: InlineWorker,
        modules: Callable[[str, str], None],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("POLICY_TRAINER_STEPS", "5")
        modules(
            "fake",
            "import os, sys\nfound = {k: v for k, v in os.environ.items() if k.startswith('POLICY_TRAINER_')}\n"
            "print(found, 'a-secret-token' in str(sys.argv))\n",
        )
        worker.start()
        log = tmp_path / "rollout.log"
        eventually(lambda: log.read_text().endswith("\n"))
        assert log.read_text() == "{'POLICY_TRAINER_TOKEN': 'a-secret-token'} False\n"

    def dies(self, worker: InlineWorker) -> None:
        eventually(lambda: worker._child.exit_status is not None)

    def test_one_that_always_dies_is_given_up(self, worker: InlineWorker, notes: list[str], clock: Clock) -> None:
        worker.start()
        for death, pause in enumerate([1, 2, 4, 8], 1):
            self.dies(worker)
            worker.check()
            assert len(notes) == death
            assert "status 7" in notes[-1] and "I cannot go on" in notes[-1]
            pid = worker._child.pid
            clock.now += pause - 0.01
            worker.check()
            assert worker._child.pid == pid and len(notes) == death, "it is noted once, and rests"
            clock.now += 0.02
            worker.check()
            assert worker._child.pid != pid, "it is started again"
        self.dies(worker)
        with pytest.raises(RunFailed, match=r"(?s)I cannot go on.*died 5 times without delivering a batch"):
            worker.check()

    def test_a_batch_wipes_the_slate_clean(self, worker: InlineWorker, notes: list[str], clock: Clock) -> None:
        worker.start()
        for _ in range(7):
            self.dies(worker)
            worker.check()
            clock.now += 1.01
            worker.check()
            worker.delivered()
        assert len(notes) == 7

    def test_one_that_lives_is_left_alone(
        self, worker: InlineWorker, notes: list[str], modules: Callable[[str, str], None]
    ) -> None:
        modules("fake", SLEEPS)
        worker.start()
        pid = worker._child.pid
        worker.check()
        assert worker._child.pid == pid and not notes
        assert str(pid) in worker.describe()


def test_external_workers_are_only_spoken_of(tmp_path: Path) -> None:
    external = ExternalWorkers(tmp_path / "config.toml")
    external.start()
    external.check()
    external.delivered()
    external.stop()
    assert f"policy-trainer rollout --config {tmp_path / 'config.toml'}" in external.describe()
