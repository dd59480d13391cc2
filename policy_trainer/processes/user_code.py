"""The main program of a process that runs users' code and answers its parent."""

import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from policy_trainer.processes.limits import limit_memory, watchdog
from policy_trainer.processes.messages import serve
from policy_trainer.processes.user_output import UserOutput
from shared.process import end_with_parent


def serve_parent(**methods: Callable[..., Mapping[str, Any] | Iterator[Mapping[str, Any]]]) -> None:
    """Answers the parent's requests, each of which names one of these methods, until the parent disconnects.

    `UserProcess` starts the program that calls it.
    """
    end_with_parent()
    descriptor, memory = map(int, sys.argv[1:])
    limit_memory(memory)
    with socket.socket(fileno=descriptor) as connection:
        serve(connection, lambda request: methods[request.pop("do")](**request), partial(guard, UserOutput()))


@contextmanager
def guard(output: UserOutput, seconds: float) -> Iterator[None]:
    """Surrounds a call of users' code in a process of its own: limits what it prints, and how long it may block."""
    output.begin()
    with watchdog(seconds, output.descriptor):
        yield
