"""Connections of sessions: to processes of a fork server, and to the process that began the run."""

import socket
import threading
from collections.abc import Sequence
from typing import Protocol

from policy_trainer.processes.forking import ForkedProcess
from policy_trainer.processes.messages import Connection, ProcessEnded
from policy_trainer.processes.user_process import UserProcess, exit_status
from policy_trainer.processes.user_socket import connect
from policy_trainer.rewards.function_server import read_address
from shared.errors import UserError

# Time limit for imports, for descriptions and for making an environment, which may start programs.
START_SECONDS = 300.0


class Place(Protocol):
    """Where sessions run."""

    def connect(self) -> Connection:
        """A new session, whose `Host` answers. Raises UserError if there can be none."""
        ...


class ForkedSessions:
    """Sessions in processes of their own, which a process that has imported the user's modules forks."""

    def __init__(self, tools: Sequence[str], environments: Sequence[str]) -> None:
        """Raises UserError for what cannot be imported."""
        self._tools = [*tools]
        self._environments = [*environments]
        self._lock = threading.Lock()
        self._closed = False
        self._server = self._start()

    def connect(self) -> Connection:
        with self._lock:
            if self._closed:
                raise UserError("tools: no more rollouts can begin: the run is ending")
            if not self._server.alive:  # killed, when the machine ran out of memory
                self._server.end()
                self._server = self._start()
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    process = ForkedProcess(self._server.ask, START_SECONDS, [theirs.fileno()])
            except (OSError, ProcessEnded) as error:
                ours.close()
                raise UserError(f"tools: no process can be started for a rollout: {error}") from error
        return Connection(ours, lambda: _ended(process))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._server.end()

    def _start(self) -> UserProcess:
        server = UserProcess("policy_trainer.rollout.environments.fork_server", memory=0)
        try:
            answer = server.ask("load", START_SECONDS, tools=self._tools, environments=self._environments)
        except ProcessEnded as ended:
            raise UserError(f"tools: importing their modules {ended}") from None
        if answer["refusal"]:
            server.end()
            raise UserError(*answer["refusal"])
        return server


def _ended(process: ForkedProcess) -> str:
    status = process.end()
    return "ended the process" if status is None else f"ended the process, {exit_status(status)}"


class CallerSessions:
    """Sessions in the process that began the run, each in a thread. A thread that hangs is abandoned."""

    def __init__(self, label: str, setting: str) -> None:
        """label: of a tool or environment there, for errors. Raises UserError if there is no such process."""
        self._label, self._setting = label, setting
        self._address = read_address(label, setting)

    def connect(self) -> Connection:
        try:
            return Connection(connect(self._address))
        except OSError as error:
            raise UserError(
                f"{self._setting}: the program that began the run does not answer for {self._label}: {error}"
            ) from error
