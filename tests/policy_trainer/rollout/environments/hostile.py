"""Tools and environments that do what they should not."""

import asyncio
import io
import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


async def add_slowly(a: int, b: int) -> int:
    """Adds.

    Args:
        a: the first number
        b: the second number
    """
    await asyncio.sleep(0)
    return a + b


def do(what: str) -> object:
    """Does something bad.

    Args:
        what: the name of it
    """
    return DEEDS[what]()


def _exhaust() -> object:
    return [bytearray(2**26) for _ in range(1000)]


def _recurse() -> object:
    return _recurse()


def _raise(error: BaseException) -> object:
    raise error


def _fork() -> object:
    if os.fork() == 0:
        return "the child"
    return "the parent"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


DEEDS = {
    "answer": lambda: "fine",
    "megabytes": lambda: "x" * 2_000_000,
    "hang": lambda: time.sleep(1000),
    "hold": lambda: re.match(r"(a|aa)+$", "a" * 60 + "b"),
    "fork": _fork,
    "exit": lambda: os._exit(3),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "chdir": lambda: os.chdir("/"),
    "where": os.getcwd,
    "print": lambda: [print("line", number) for number in range(1000)] and "printed",
    "exhaust": _exhaust,
    "recurse": _recurse,
    "leave": lambda: sys.exit(4),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "raise": lambda: _raise(ValueError("a bad value")),
    "raise surrogate": lambda: _raise(ValueError("\udfff")),
    "unprintable": lambda: _raise(Unprintable()),
    "object": object,
    "surrogate": lambda: "\ud800",
    "generator": lambda: (each for each in "ab"),
    "picture": lambda: [{"type": "image", "image": "..."}],
    "texts": lambda: [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    "list": lambda: [1, 2],
    "pid": os.getpid,
    "spawn": lambda: subprocess.Popen(["sleep", "1000"], start_new_session=True).pid,
    "spawn and hang": lambda: (subprocess.Popen(["sleep", "1001"], start_new_session=True), time.sleep(1000)),
    "garbage": lambda: _write_to_sockets(b"garbage"),
    "stray line": lambda: _write_to_sockets(b'{"value": "wrong", "kind": "", "log": ""}\n'),
    "stray number": lambda: _write_to_sockets(b"5\n"),
    "close stdout": lambda: (sys.stdout.close(), sys.stderr.close()),
    "close original stdout": lambda: (sys.__stdout__.close(), sys.__stderr__.close()),  # type: ignore[union-attr]
    "replace stdout": lambda: [setattr(sys, name, io.StringIO()) for name in ("stdout", "stderr")],
    "no stdout": lambda: [setattr(sys, name, None) for name in ("stdout", "stderr")],
    "close descriptors": lambda: [os.close(descriptor) for descriptor in (0, 1, 2)],
    "cover descriptors": lambda: [os.dup2(os.open("/dev/null", os.O_WRONLY), place) for place in (1, 2)],
    "close all": lambda: os.closerange(0, 1000),
    "little recursion": lambda: sys.setrecursionlimit(50),
    "set alarm": lambda: [signal.setitimer(signal.ITIMER_REAL, 0.5), os.umask(0o777)],
    "make file": lambda: oct(os.umask(0)),
    "nap": lambda: time.sleep(1),
    "print much": lambda: print("x" * 10_000_000),
    "write much": lambda: subprocess.run(["head", "-c", "10000000", "/dev/zero"]).returncode,
    "environ": lambda: sorted(os.environ),
    "daemon": lambda: _daemon(),
    "daemons": lambda: [_daemon() for _ in range(5)],
}


def _write_to_sockets(data: bytes) -> str:
    for descriptor in filter(_is_socket, range(3, 12)):
        os.write(descriptor, data)
    return "fine"


def _daemon() -> None:
    """A grandchild in a session of its own, whose parent has ended, and a child of it."""
    command = "setsid sh -c 'sleep 1002 & exec sleep 1003' & exit"
    subprocess.run(["sh", "-c", command], start_new_session=True, check=True)


def _is_socket(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket")
    except OSError:
        return False


class Counter:
    """Counts how often it was made and reset."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.resets = 0
        self.total = 0
        self._secret = 1

    def reset(self, start: int = 0, **columns: object) -> str:
        self.resets += 1
        self.total = start
        return f"{random.randrange(10**9)} {np.random.randint(10**9)} {sorted(columns)}"

    def increment(self, by: int) -> int:
        """Increments.

        Args:
            by: how much
        """
        self.total += by
        return self.total

    async def misbehave(self, what: str) -> object:
        """Does something bad.

        Args:
            what: the name of it
        """
        return DEEDS[what]()

    def get_reward(self) -> float:
        if self.total == 13:
            raise ValueError("13")
        if self.total == 14:
            os._exit(1)
        return float(self.total)

    async def get_step_reward(self) -> float:
        return self.total / 2

    @property
    def endless(self) -> int:
        time.sleep(1000)
        return 1

    def _private(self) -> None: ...


class WithServer(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.server = subprocess.Popen(["sleep", "1004"], start_new_session=True)


class SlowToMake:
    def __init__(self) -> None:
        time.sleep(1.5)

    def reset(self) -> None: ...


class Fragile:
    """Its reset does what a row says."""

    def reset(self, how: str) -> object:
        return DEEDS[how]()

    def get_reward(self) -> float:
        return float("nan")


def made_by_a_function() -> Counter:
    counter = Counter()
    counter.total = 5
    return counter


def rewards_totals(prompts: list[object], completions: list[object], environments: list[object]) -> list[float]:
    return [environment.total for environment in environments]  # type: ignore[attr-defined]


async def rewards_awaited(completions: list[object], environments: list[object]) -> list[float]:
    return [await each.get_step_reward() + each.increment(by=1) for each in environments]  # type: ignore[attr-defined]


def rewards_turns(completions: list[object], **columns: object) -> list[float]:
    """Rewards of rollouts see the messages of all turns."""
    assert "environments" not in columns
    return [float(len(completion)) for completion in completions]  # type: ignore[arg-type]
