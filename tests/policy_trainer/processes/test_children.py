"""Child processes: their output, their environment and their end."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.processes import children
from policy_trainer.processes.children import Child, RestartedChild
from policy_trainer.processes.fork_server import ForkServer
from policy_trainer.processes.lifecycle.endings import RunFailed
from tests.harness.processes import until
from tests.policy_trainer.children import Clock, FakeChild

OpenChild = Callable[..., Child]


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["python -m", "forked"])
def forks(request: pytest.FixtureRequest) -> ForkServer | None:
    return request.getfixturevalue("fork_server") if request.param else None


@pytest.fixture
def open_child(tmp_path: Path, forks: ForkServer | None) -> Iterator[OpenChild]:
    made: list[Child] = []

    def make(module: str, *arguments: str, **settings: Any) -> Child:
        made.append(Child("child", module, arguments, tmp_path / "logs" / "child.log", forks=forks, **settings))
        return made[-1]

    yield make
    for child in made:
        child.stop()


SLEEPS = "import time\nprint('up', flush=True)\ntime.sleep(60)\n"
STUBBORN = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SLEEPS}"


class TestChild:
    def test_output_and_status(self, modules: Callable[[str, str], None], open_child: OpenChild) -> None:
        lines = "for i in range(100): print(i, file=sys.stderr)\nprint(sys.argv[1:])\nsys.exit(3)\n"
        modules("talks", "import sys\n" + lines)
        child = open_child("talks", "a", "b c")
        assert child.pid is None and child.exit_status is None
        for _ in range(2):
            child.start()
            until(lambda: child.exit_status is not None)
            assert child.exit_status == 3 and len(child.last_lines().splitlines()) == 12
            assert {"99", "['a', 'b c']"} <= set(child.last_lines().splitlines())

    def test_files_of_the_working_directory_hide_no_library(
        self,
        modules: Callable[[str, str], None],
        open_child: OpenChild,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        (tmp_path / "elsewhere").mkdir()
        for name in ("queue.py", "shared.py"):
            (tmp_path / "elsewhere" / name).write_text("raise ValueError('of a user')")
        monkeypatch.chdir(tmp_path / "elsewhere")
        modules("imports", "import queue, shared.errors\nprint('imported')\n")
        child = open_child("imports")
        child.start()
        until(lambda: child.exit_status is not None)
        assert child.last_lines() == "imported"

    def test_its_output_cannot_control_a_terminal(
        self, modules: Callable[[str, str], None], open_child: OpenChild
    ) -> None:
        """Errors and notes quote it, even in a Python script."""
        modules("hostile", r"print('\x1b]0;owned\x07 \x9b2J')")
        child = open_child("hostile")
        child.start()
        until(lambda: child.exit_status is not None)
        assert child.last_lines() == r"\x1b]0;owned\x07 \x9b2J"

    def test_stop_ends_it(self, modules: Callable[[str, str], None], open_child: OpenChild) -> None:
        modules("sleeps", SLEEPS)
        child = open_child("sleeps")
        child.start()
        until(lambda: child.last_lines() == "up")
        assert child.exit_status is None and child.pid
        assert os.getpgid(child.pid) != os.getpgid(0)  # Ctrl-C reaches only the parent
        child.stop()
        assert child.exit_status == -signal.SIGTERM
        child.stop()

    def test_its_log_has_a_bound(
        self,
        modules: Callable[[str, str], None],
        open_child: OpenChild,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        monkeypatch.setattr(children, "_MOST_LOG", 10_000)
        monkeypatch.setattr(children, "_KEPT_LOG", 100)
        modules("talks", "for number in range(5000): print(number, flush=True)\ninput()\nprint('end')\n")
        child, log = open_child("talks"), tmp_path / "logs" / "child.log"
        child.start()
        until(lambda: child.exit_status is not None)
        assert log.stat().st_size > 20_000
        child.bound_log()
        lines = log.read_text().splitlines()
        assert len(lines) < 20 and lines[0] == "[the beginning of this log is left out]" and "EOFError" in lines[-1]
        child.start()
        until(lambda: child.exit_status is not None)
        assert log.read_text().splitlines()[:3] == lines[:3] and child.last_lines().splitlines()[-1] == lines[-1]

    def test_a_stubborn_child_is_killed(
        self, modules: Callable[[str, str], None], open_child: OpenChild, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("policy_trainer.processes.children._STOP_SECONDS", 0.2)
        modules("stubborn", STUBBORN)
        child = open_child("stubborn")
        child.start()
        until(lambda: child.last_lines() == "up")
        child.stop()
        assert child.exit_status == -signal.SIGKILL

    def test_its_environment_has_secrets_and_no_settings(
        self, modules: Callable[[str, str], None], open_child: OpenChild, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("POLICY_TRAINER_MAX_STEPS", "5")
        modules(
            "tells",
            "import os, sys\nfound = {k: v for k, v in os.environ.items() if k.startswith('POLICY_TRAINER_')}\n"
            "print(found, 'a-secret' in str(sys.argv))\n",
        )
        child = open_child("tells", secrets={"POLICY_TRAINER_TOKEN": "a-secret"})
        child.start()
        until(lambda: child.exit_status is not None)
        assert child.last_lines() == "{'POLICY_TRAINER_TOKEN': 'a-secret'} False"

    @pytest.mark.parametrize("torchrun", [False, True])
    def test_torchruns_variables_of_a_rank_are_not_inherited(
        self, modules: Callable[[str, str], None], open_child: OpenChild, monkeypatch: pytest.MonkeyPatch,
        torchrun: bool,
    ) -> None:  # fmt: skip
        users = {"MASTER_KEY", "LOCAL_CACHE", "ROLE_ARN", "GROUP_ID", "RANKING", "WORLD_SIZES", "MASTER_PORTAL"}
        rank = {"RANK", "WORLD_SIZE"} if torchrun else set[str]()
        of_a_job = {"MASTER_ADDR", "LOCAL_RANK", "ROLE_NAME", "TORCHELASTIC_RUN_ID"}
        for name in users | rank | of_a_job:
            monkeypatch.setenv(name, "1")
        modules("tells", "import os\nprint(*sorted(os.environ), sep='|')\n")
        child = open_child("tells")
        child.start()
        until(lambda: child.exit_status is not None)
        inherited = set(child.last_lines().split("|"))
        assert inherited & (users | rank | of_a_job) == (users if torchrun else users | of_a_job)


def test_a_child_that_is_stopped_gets_one_signal(modules: Callable[[str, str], None], open_child: OpenChild) -> None:
    modules(
        "counts",
        "import signal, time\n"
        "seen = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: seen.append(1))\n"
        "print('up', flush=True)\n"
        "while not seen:\n    time.sleep(0.01)\n"
        "time.sleep(0.2)\n"
        "print(f'{len(seen)} signals')\n",
    )
    child = open_child("counts")
    child.start()
    until(lambda: child.last_lines() == "up")
    child.terminate()
    child.stop()
    assert child.exit_status == 0 and "1 signals" in child.last_lines()


def test_ctrl_c_while_a_child_is_started_leaves_no_process(
    modules: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules("sleeps", "import time\ntime.sleep(600)\n")
    run = children._run

    def interrupted(*arguments: Any) -> Any:
        process = run(*arguments)
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(children, "_run", interrupted)
    child = Child("sleeper", "sleeps", [], tmp_path / "log")
    with pytest.raises(KeyboardInterrupt):
        child.start()
    child.stop()
    assert child.exit_status == -signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(children, "time", made)
    return made


@pytest.fixture
def child() -> FakeChild:
    return FakeChild("sorter", "module", [], Path(), {})


@pytest.fixture
def notes() -> list[str]:
    return []


def restarted(child: Any, notes: list[str], **settings: Any) -> RestartedChild:
    made = RestartedChild(child, notes.append, **settings)
    made.start()
    return made


def test_restarts_end_when_it_always_dies(child: FakeChild, notes: list[str], clock: Clock) -> None:
    process = restarted(child, notes, futile=" without a letter")
    for death, pause in enumerate([1, 2, 4, 8], 1):
        child.die()
        process.check()
        assert len(notes) == death
        assert "the sorter died with status 7" in notes[-1] and "I cannot go on" in notes[-1]
        clock.now += pause - 0.01
        process.check()
        assert child.pid == death and len(notes) == death, "it is noted once, and paused"
        clock.now += 0.02
        process.check()
        assert child.pid == death + 1, "it is started again"
    child.die()
    with pytest.raises(RunFailed, match=r"(?s)I cannot go on.*died 5 times without a letter"):
        process.check()


@pytest.mark.parametrize("lasting", [None, 100])
def test_deaths_are_counted_anew_after_a_success_or_a_long_life(
    child: FakeChild, notes: list[str], clock: Clock, lasting: float | None
) -> None:
    process = restarted(child, notes, **({"lasting": lasting} if lasting else {}))
    for _ in range(7):
        clock.now += lasting or 0
        child.die()
        process.check()
        clock.now += 1.01
        process.check()
        if lasting is None:
            process.succeeded()
    assert len(notes) == child.pid - 1 == 7


def test_a_child_that_refuses_its_settings_is_not_restarted(child: FakeChild, notes: list[str]) -> None:
    process = restarted(child, notes)
    child.die(status=2)
    with pytest.raises(RunFailed, match=r"(?s)status 2.*I cannot go on"):
        process.check()
