"""The processes that load a server: each runs one role until it is told to stop, and returns its result."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from typing import Any

_PATIENCE = 60.0

Stopping = Callable[[], bool]
# Called with the server's port, `stopping`, and further arguments; returns its result soon after `stopping` is true.
Role = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Played:
    """seen: the role's result. seconds: how long it ran. cpu: its share of one core."""

    seen: Any
    seconds: float
    cpu: float


class Crew:
    """Roles at work on one server. They end with the block, also when the process that owns it is killed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._context = get_context("spawn")
        self._stop = self._context.Event()
        self._members: dict[str, tuple[SpawnProcess, Connection]] = {}

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for process, _ in self._members.values():
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def start(self, name: str, role: Role, *arguments: Any) -> None:
        """Returns once the role is at work."""
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_play, args=(role, self._port, self._stop, there, arguments), name=name, daemon=True
        )
        process.start()
        there.close()
        self._members[name] = (process, here)
        _receive(name, here)

    def end(self) -> dict[str, Played]:
        """Stops all roles and returns their results by name."""
        self._stop.set()
        return {name: _receive(name, pipe) for name, (_, pipe) in self._members.items()}


async def play_all(stopping: Stopping, members: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Clients of one role, until it is told to stop. Raises what one of them raises."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(member) for member in members]
        while not stopping():
            await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()


def _receive(name: str, pipe: Connection) -> Any:
    if not pipe.poll(_PATIENCE):
        raise RuntimeError(f"{name} does not answer")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError(f"{name} has failed: its traceback is above") from None


def _play(role: Role, port: int, stop: Event, pipe: Connection, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which stops all roles
    parent = os.getppid()

    async def play() -> Any:
        return await role(port, lambda: stop.is_set() or os.getppid() != parent, *arguments)

    pipe.send("at work")
    began, worked = time.monotonic(), time.process_time()
    seen = asyncio.run(play())
    seconds = time.monotonic() - began
    pipe.send(Played(seen, seconds, (time.process_time() - worked) / seconds))
