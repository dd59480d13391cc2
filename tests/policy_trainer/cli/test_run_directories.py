"""Questions that a run's directory answers need no PyTorch, and one process at a time trains in it; how a command
ends."""

import json
import sys
from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from policy_trainer.cli import status, training
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.supervised.training import SupervisedResult
from shared.client import NotRefServer
from shared.errors import UserError

# The module of each command that imports PyTorch.
HEAVY = {
    "train": "policy_trainer.trainer.run",
    "sft": "policy_trainer.supervised.sft",
    "reward_model": "policy_trainer.supervised.reward_model.training",
    "replay": "policy_trainer.trainer.replay",
}
SETTINGS = {
    "train": [],
    "sft": ["--data.path", "rows.jsonl"],
    "reward_model": ["--data.path", "rows.jsonl"],
    "replay": ["--batches", "recorded"],
}
commands = pytest.mark.parametrize("command", HEAVY)
Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command that may not import PyTorch."""
    monkeypatch.chdir(tmp_path)
    for module in HEAVY.values():
        monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError

    def run(command: str, *options: str) -> int:
        arguments = ["--model", "model", "--run-dir", "run", *SETTINGS[command], *options]
        return getattr(training, command)(arguments)

    return run


@commands
def test_a_directory_with_a_run_is_refused(command: str, run: Run, tmp_path: Path) -> None:
    with pytest.raises(ImportError):
        run(command)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "kind": "step"}\n')
    with pytest.raises(UserError, match=r"run_dir: run holds a run already; .*another --run-dir"):
        run(command)


@commands
def test_a_directory_that_another_process_trains_in_is_refused(command: str, run: Run, tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run").hold(), pytest.raises(UserError, match="another trainer is at work in run;"):
        run(command)


def test_a_changed_setting_that_must_stay_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text('model = "other"\n')
    with pytest.raises(UserError, match="model: --resume cannot change it"):
        run("train", "--resume")


def test_the_last_step_of_a_finished_run_is_named(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.make()
    directory.begin_lineage()
    lineage = directory.lineage
    directory.mark_finished(40)
    with pytest.raises(ImportError):  # its model is gone, so the run goes on to save it
        run("train", "--resume", "--max-steps", "40")
    directory.model.mkdir()
    assert run("train", "--resume", "--max-steps", "40") == 0
    message = "the run in run finished at step 40; its model is in run/model. A higher --max-steps continues it"
    assert message in capsys.readouterr().err
    with pytest.raises(ImportError):
        run("train", "--resume", "--max-steps", "41")
    assert json.loads(directory.identity.read_text()) == {"lineage": lineage, "finished": 40}


def test_under_torchrun_rank_0_of_a_finished_run_does_not_leave_the_others_waiting(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.make()
    directory.begin_lineage()
    directory.mark_finished(40)
    directory.model.mkdir()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("policy_trainer.cli.training.run_as_rank", lambda config, lead: 7)
    assert run("train", "--resume", "--max-steps", "40") == 7


def test_a_name_in_an_error_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("configure_logs", "end_with_parent"):  # they are the whole process's
        monkeypatch.setattr(status, name, lambda: None)

    def fail() -> int:
        raise UserError("model: the server has \x1b[2Jé\nstart another")

    assert status.exit_status("train", fail) == 2
    assert capsys.readouterr().err == "policy-trainer train: model: the server has \\x1b[2Jé\nstart another\n"


def test_errors_of_the_server_have_a_remedy_and_bugs_their_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("configure_logs", "end_with_parent"):
        monkeypatch.setattr(status, name, lambda: None)

    def fail(error: Exception) -> int:
        raise error

    assert status.exit_status("train", partial(fail, NotRefServer("it is another"))) == 1
    remedy = "give the URL that `ref-server serve` prints"
    assert capsys.readouterr().err == f"policy-trainer train: server: it is another; {remedy}\n"
    with pytest.raises(LookupError, match="a bug"):
        status.exit_status("train", partial(fail, LookupError("a bug")))


def test_a_run_ends_with_the_commands_that_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server has ended, and what `make` installed need not be on PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    monkeypatch.chdir(tmp_path)
    output = StringIO()
    result = SupervisedResult(finished=True, steps=60, evaluation={}, seconds=30.0)
    assert status.training_status(result, Path("runs/my demo"), Console(file=output)) == 0
    assert output.getvalue() == (
        "60 steps in 30.0 s; the model is in runs/my demo/model\n"
        "to open its dashboard again: .venv/bin/policy-trainer dashboard 'runs/my demo'\n"
        "to write its report, one HTML file: .venv/bin/policy-trainer report 'runs/my demo'\n"
    )
    program = tmp_path / ".venv/bin/policy-trainer"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o700)
    monkeypatch.setenv("PATH", str(program.parent))
    status.print_commands(Path("runs/mine"), Console(file=output))
    assert "\nto open its dashboard again: policy-trainer dashboard runs/mine\n" in output.getvalue()
