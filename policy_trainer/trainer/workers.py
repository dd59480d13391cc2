"""The rollout workers of a trainer: one that it starts itself, or others that it waits for."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from policy_trainer.config import ENV_PREFIX, TrainConfig, WeightsPlace
from policy_trainer.lifecycle.processes import Child, RestartedChild
from policy_trainer.queue_client.server import token_of
from policy_trainer.run_files.run_directory import RunDirectory


class Workers(Protocol):
    def start(self) -> None: ...

    def check(self) -> None:
        """Restarts dead workers that the trainer started. Called while the trainer waits."""
        ...

    def delivered(self) -> None:
        """Called when batches have arrived."""
        ...

    def describe(self) -> str:
        """What the trainer waits for, as text."""
        ...

    def stop(self) -> None: ...


def choose_workers(config: TrainConfig, server: str, directory: RunDirectory, note: Callable[[str], None]) -> Workers:
    """server: its URL."""
    if config.rollout == "inline":
        return InlineWorker(directory.config, server, directory.logs / "rollout.log", note, token_of(config))
    commands: Mapping[WeightsPlace, str] = {
        "directory": f"policy-trainer rollout --config {directory.config}",
        "server": f"policy-trainer rollout --server {server} --run {config.run}",
    }
    return ExternalWorkers(commands[config.weights])


class InlineWorker:
    """One rollout worker as a child process, restarted when it dies."""

    def __init__(self, config: Path, server: str, log: Path, note: Callable[[str], None], token: str | None) -> None:
        """token: of the server; passed in the environment, since command lines are visible to everyone."""
        secret = {f"{ENV_PREFIX}TOKEN": token} if token else {}
        command = ["rollout", "--config", str(config), "--server", server]
        child = Child("rollout worker", "policy_trainer", command, log, secret)
        self._process = RestartedChild(child, note, futile=" without delivering a batch in between")

    def start(self) -> None:
        self._process.start()

    def check(self) -> None:
        """Restarts a worker that has died, after a pause. Raises RunFailed if a restart does not help."""
        self._process.check()

    def delivered(self) -> None:
        self._process.succeeded()

    def describe(self) -> str:
        return f"the rollout worker (process {self._process.pid}) starts, or samples and judges completions"

    def stop(self) -> None:
        self._process.stop()


class ExternalWorkers:
    """Workers that the user starts and restarts."""

    def __init__(self, command: str) -> None:
        """command: what starts one."""
        self._command = command

    def start(self) -> None:
        pass

    def check(self) -> None:
        pass

    def delivered(self) -> None:
        pass

    def describe(self) -> str:
        return f"no rollout worker delivers; start one with `{self._command}`"

    def stop(self) -> None:
        pass
