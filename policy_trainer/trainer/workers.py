"""Who samples for a trainer: a worker that it starts itself, or others that it waits for."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pydantic import SecretStr

from policy_trainer.config import ENV_PREFIX
from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.lifecycle.processes import Child

# So many deaths without a batch in between are a fault that a restart does not mend.
_MAX_DEATHS = 5
# The status of a command that refuses its settings or data: another start would end the same.
_REFUSED = 2


class Workers(Protocol):
    def start(self) -> None: ...

    def check(self) -> None:
        """Looks after them; called while the trainer waits."""
        ...

    def delivered(self) -> None:
        """A batch has come."""
        ...

    def describe(self) -> str:
        """Whom the trainer waits for."""
        ...

    def stop(self) -> None: ...


class InlineWorker:
    """One rollout worker as a process of the trainer's, started again when it dies."""

    def __init__(self, config: Path, log: Path, note: Callable[[str], None], token: SecretStr | None) -> None:
        """token: of the server. It is in no file, and everybody sees a command line."""
        secret = {f"{ENV_PREFIX}TOKEN": token.get_secret_value()} if token else {}
        self._child = Child("rollout worker", "policy_trainer", ["rollout", "--config", str(config)], log, secret)
        self._note = note
        self._deaths = 0
        self._not_before = 0.0

    def start(self) -> None:
        self._child.start()

    def check(self) -> None:
        """Restarts a worker that has died, after a pause. Raises RunFailed when it dies again and again."""
        status = self._child.exit_status
        if status is None:
            return
        if not self._not_before:
            self._deaths += 1
            words = f"the rollout worker died with status {status}; its last words:\n{self._child.last_words()}"
            if status == _REFUSED:
                raise RunFailed(words)
            if self._deaths >= _MAX_DEATHS:
                raise RunFailed(f"{words}\nit died {self._deaths} times without delivering a batch in between")
            self._note(f"{words}\nstarting it again")
            self._not_before = time.monotonic() + 2.0 ** (self._deaths - 1)
        if time.monotonic() >= self._not_before:
            self._not_before = 0.0
            self._child.start()

    def delivered(self) -> None:
        self._deaths = 0

    def describe(self) -> str:
        return f"the rollout worker (process {self._child.pid}) to sample"

    def stop(self) -> None:
        self._child.stop()


class ExternalWorkers:
    """Workers that somebody else starts and looks after."""

    def __init__(self, config: Path) -> None:
        self._config = config

    def start(self) -> None:
        pass

    def check(self) -> None:
        pass

    def delivered(self) -> None:
        pass

    def describe(self) -> str:
        return f"a rollout worker; start one with `policy-trainer rollout --config {self._config}`"

    def stop(self) -> None:
        pass
