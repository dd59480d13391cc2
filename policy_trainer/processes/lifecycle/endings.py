"""How a run ends before its last step: a user stops it, or it fails, as when the disk is full.

The first Ctrl-C asks the training loop to stop between steps; a second stops the process at once.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from safetensors import SafetensorError

from shared.errors import ExpectedError
from shared.spelling import spell_setting


class Stopped(Exception):
    """A user asked this process to stop while it was waiting."""


class StopTraining(Exception):
    """Raised by a caller's function to end the run with a checkpoint."""


class RunFailed(ExpectedError):
    """The run cannot continue for a reason outside the code."""


class RankLost(RunFailed):
    """Another rank ended, or did not answer, in the middle of a computation."""


class StopRequest:
    """While active, SIGINT and SIGTERM set a flag instead of raising in the middle of a step.

    Only the main thread may handle signals: in another thread, `set` is the only request.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        in_main_thread = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if in_main_thread else ():
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Raises Stopped once a stop was requested. Called by code that waits."""
        if self._event.is_set():
            raise Stopped

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._event.is_set():
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # under Slurm, torchrun and the cluster each send a SIGTERM
        self._event.set()
        _say("\nstopping; press Ctrl-C again to stop at once\n")


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Delays SIGINT and SIGTERM to the end of the block; in the main thread, as others handle none. For short blocks.

    A KeyboardInterrupt in the middle of `subprocess.Popen` would leave a process that nobody knows of.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    came: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in ((signal.SIGINT, signal.SIGTERM) if in_main_thread else ())
        if callable(signal.getsignal(number))
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


def _say(text: str) -> None:
    """Writes to standard error from a signal handler, which may have interrupted a print to it."""
    with suppress(OSError, RuntimeError):
        if sys.stderr is sys.__stderr__:
            os.write(sys.stderr.fileno(), text.encode())
        else:  # a notebook's, whose file is the notebook server's terminal
            sys.stderr.write(text)


@contextmanager
def write_failures(what: Path | str, remedy: str = "") -> Iterator[None]:
    """Turns errors of the file system into RunFailed. what: the file that is written. remedy: what to do; by default,
    to resume."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        resume = f"once it can, {spell_setting('resume', True)} goes on from the last checkpoint"
        raise RunFailed(f"{what} cannot be written: {error}", remedy or resume) from error
