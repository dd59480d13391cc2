"""Stand-ins for child processes, and for the time between their deaths."""

from collections.abc import Mapping, Sequence
from pathlib import Path


class Clock:
    """Stands in for the module `time`. Sleeping moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeChild:
    """A process that runs until `die`. pid: how often it was started."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        secrets: Mapping[str, str],
        inherited: Sequence[int] = (),
        forks: object = None,
    ) -> None:
        self.name, self.module, self.arguments, self.log, self.secrets = name, module, list(arguments), log, secrets
        self.inherited, self.forks = inherited, forks
        self.exit_status: int | None = None
        self.pid = 0
        self.stopped = False

    def bound_log(self) -> None: ...

    def start(self) -> None:
        self.pid += 1
        self.exit_status = None

    def last_lines(self) -> str:
        return "I cannot go on"

    def terminate(self) -> None: ...

    def stop(self) -> None:
        self.stopped = True

    def die(self, status: int = 7) -> None:
        self.exit_status = status
