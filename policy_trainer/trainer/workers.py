"""The rollout workers of a trainer: one that it starts itself, or others that it waits for."""

from collections.abc import Callable

from policy_trainer.config import ENV_PREFIX, TrainConfig
from policy_trainer.lifecycle.processes import Child, RestartedChild
from policy_trainer.queue_client.server import token_of
from policy_trainer.run_files.run_directory import RunDirectory


class Workers:
    """Workers that the user starts and restarts. command: what starts one; for messages."""

    def __init__(self, command: str) -> None:
        self._command = command

    def start(self) -> None:
        pass

    def check(self) -> None:
        """Called while the trainer waits. Restarts a dead worker that the trainer started."""

    def delivered(self) -> None:
        """Called when batches have arrived."""

    def describe(self) -> str:
        """What the trainer waits for."""
        return f"no rollout worker delivers; start one with `{self._command}`"

    def stop(self) -> None:
        pass


class InlineWorker(Workers):
    """One rollout worker as a child process, restarted when it dies."""

    def __init__(self, process: RestartedChild) -> None:
        self._process = process

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


def choose_workers(config: TrainConfig, server: str, directory: RunDirectory, note: Callable[[str], None]) -> Workers:
    """server: its URL."""
    command = ["rollout", "--config", str(directory.config)]
    if config.rollout == "external":
        if config.weights == "server":
            command = ["rollout", "--server", server, "--run", config.run]
        return Workers(f"policy-trainer {' '.join(command)}")
    command += ["--server", server]
    token = token_of(config)
    secret = {f"{ENV_PREFIX}TOKEN": token} if token else {}  # not an argument: everyone can read command lines
    child = Child("rollout worker", "policy_trainer", command, directory.logs / "rollout.log", secret)
    return InlineWorker(RestartedChild(child, note, futile=" without delivering a batch in between"))
