"""How a command ends: its exit status, and the reason on standard error when it fails."""

import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from policy_trainer.processes.lifecycle.endings import RunFailed
from shared.errors import ExpectedError, UserError, printable
from shared.logs import configure_logs
from shared.process import end_with_parent

if TYPE_CHECKING:  # PyTorch loads late, so that wrong options fail at once
    from policy_trainer.supervised.training import SupervisedResult
    from policy_trainer.trainer.run import TrainResult


def exit_status(command: str, run: Callable[[], int]) -> int:
    """Runs the command in this process, which logs and ends with its parent."""
    configure_logs()
    end_with_parent()
    try:
        return run()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except UserError as error:
        return _fail(command, str(error), 2)
    except RunFailed as error:
        return _fail(command, str(error), 1)
    except Exception as error:
        return _fail(command, _failed_request(error), 1)


def _failed_request(error: Exception) -> str:
    """Why the server could not be used. Raises any other error again."""
    # Late: settings and client take most of a second, for which `dashboard` does not wait before it starts its server.
    from policy_trainer.config import ENV_PREFIX
    from shared.client import ClientError, NotRefServer
    from shared.client.credentials import remedy

    if not isinstance(error, ClientError):
        raise error
    setting = "server: " if isinstance(error, NotRefServer) else ""
    return str(ExpectedError(f"{setting}{error}", remedy(error, ENV_PREFIX)))


def tell_device(name: str, console: Console) -> None:
    """Prints which device a setting `device` means. Raises UserError when there is no such device."""
    from shared.devices import describe_device  # late, since it loads PyTorch

    console.print(f"device: {describe_device(name)}", highlight=False)


def training_status(result: "TrainResult | SupervisedResult", run_dir: Path, console: Console) -> int:
    """Reports a training run on the console. Returns the exit status."""
    if result.finished:
        console.print(f"{result.steps} steps in {result.seconds:.1f} s; the model is in {run_dir / 'model'}")
    else:
        console.print(f"stopped after {result.steps} steps; add --resume to continue")
    if result.steps:
        print_commands(run_dir, console)
    return 0 if result.finished else 128 + signal.SIGINT


def print_commands(run_dir: Path, console: Console) -> None:
    """How to look at a run whose server has ended."""
    for what, command in (
        ("to open its dashboard again", "dashboard"),
        ("to write its report, one HTML file", "report"),
    ):
        line = f"{what}: {shlex.join((_program(), command, str(run_dir)))}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _program() -> str:
    """How to call policy-trainer as it is installed here: its directory need not be on PATH."""
    path = Path(sys.executable).with_name("policy-trainer")
    if shutil.which(path.name) == str(path):
        return path.name
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _fail(command: str, reason: str, status: int) -> int:
    """reason: may have lines. Names of models and runs in it may come from another program."""
    print(f"policy-trainer {command}:", printable(reason, keep="\n"), file=sys.stderr)
    return status
