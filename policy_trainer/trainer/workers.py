"""The rollout workers of a trainer: one that it starts itself, or others that it waits for."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pydantic import SecretStr

from policy_trainer.config import ENV_PREFIX, TrainConfig
from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.lifecycle.processes import Child
from policy_trainer.run_files.run_directory import RunDirectory

# After this many deaths without a batch in between, a restart does not help.
_MAX_DEATHS = 5
# Exit status of a command that refuses its settings or data: another start would end the same way.
_REFUSED = 2


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


def choose_workers(config: TrainConfig, directory: RunDirectory, note: Callable[[str], None]) -> Workers:
    if config.rollout == "inline":
        return InlineWorker(directory.config, directory.logs / "rollout.log", note, config.token)
    return ExternalWorkers(directory.config)


class InlineWorker:
    """One rollout worker as a child process, restarted when it dies."""

    def __init__(self, config: Path, log: Path, note: Callable[[str], None], token: SecretStr | None) -> None:
        """token: of the server; passed in the environment, since command lines are visible to everyone."""
        secret = {f"{ENV_PREFIX}TOKEN": token.get_secret_value()} if token else {}
        self._child = Child("rollout worker", "policy_trainer", ["rollout", "--config", str(config)], log, secret)
        self._note = note
        self._deaths = 0
        self._not_before = 0.0

    def start(self) -> None:
        self._child.start()

    def check(self) -> None:
        """Restarts a worker that has died, after a pause. Raises RunFailed if a restart does not help."""
        status = self._child.exit_status
        if status is None:
            return
        if not self._not_before:
            self._deaths += 1
            message = f"the rollout worker died with status {status}; its last output:\n{self._child.last_words()}"
            if status == _REFUSED:
                raise RunFailed(message)
            if self._deaths >= _MAX_DEATHS:
                raise RunFailed(f"{message}\nit died {self._deaths} times without delivering a batch in between")
            self._note(f"{message}\nstarting it again")
            self._not_before = time.monotonic() + 2.0 ** (self._deaths - 1)
        if time.monotonic() >= self._not_before:
            self._not_before = 0.0
            self._child.start()

    def delivered(self) -> None:
        self._deaths = 0

    def describe(self) -> str:
        return f"the rollout worker (process {self._child.pid}) samples and judges completions"

    def stop(self) -> None:
        self._child.stop()


class ExternalWorkers:
    """Workers that the user starts and restarts."""

    def __init__(self, config: Path) -> None:
        self._config = config

    def start(self) -> None:
        pass

    def check(self) -> None:
        pass

    def delivered(self) -> None:
        pass

    def describe(self) -> str:
        return f"no rollout worker delivers; start one with `policy-trainer rollout --config {self._config}`"

    def stop(self) -> None:
        pass
