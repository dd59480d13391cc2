"""A socket of the worker through which rewards reach the environments of rollouts."""

import json
from collections.abc import Callable, Mapping
from socketserver import StreamRequestHandler
from typing import Any

from policy_trainer.processes.user_socket import UserSocket

# Answers the request of a reward to the session of this number.
Ask = Callable[[int, Mapping[str, Any]], Mapping[str, Any]]


def relay(ask: Ask) -> UserSocket:
    def answer(client: StreamRequestHandler) -> None:
        for line in client.rfile:
            request = json.loads(line)
            client.wfile.write(json.dumps(ask(request.pop("session"), request)).encode() + b"\n")

    return UserSocket(answer, "relay")
