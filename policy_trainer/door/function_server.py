"""Answers for the functions of this process: worker and evaluations ask by JSON over HTTP on the loopback."""

import asyncio
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from policy_trainer.rewards.callers import Address, decode_samples
from policy_trainer.rewards.sandbox.answers import answers, shares
from policy_trainer.rewards.signatures import OwnReward

Answers = list[dict[str, Any]]

# A function that hangs cannot be ended. The server does not wait for it.
_STOP_SECONDS = 5.0


class FunctionServer:
    """Serves functions by name while it is entered. They run one after the other, in threads beside the training's.

    The threads are daemons: a function that hangs does not keep the process from ending.
    """

    def __init__(self, functions: Mapping[str, OwnReward]) -> None:
        self._functions = functions
        self._token = secrets.token_urlsafe(32)
        self._turn = asyncio.Lock()
        self._socket = socket.socket()
        app = Starlette(routes=[Route("/rewards/{name}", self._judge, methods=["POST"])])
        # log_config None: how this process logs is not ours to say.
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="reward functions", daemon=True
        )

    @property
    def address(self) -> Address:
        return Address(self._socket.getsockname()[1], self._token)

    def __enter__(self) -> Self:
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen()  # so that requests wait until the thread is ready
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(_STOP_SECONDS)
        self._socket.close()

    async def _judge(self, request: Request) -> Response:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return Response(status_code=401)
        function = self._functions.get(request.path_params["name"])
        if function is None:
            return Response(status_code=404)
        samples = decode_samples(await request.body())
        async with self._turn:
            if await request.is_disconnected():  # it has waited too long for a function that hangs
                return Response(status_code=408)
            judged = await _in_thread(
                lambda: [one for share in shares(function, samples) for one in answers(function, share)]
            )
        return Response(json.dumps({"answers": judged}), media_type="application/json")


async def _in_thread(work: Callable[[], Answers]) -> Answers:
    """The result of `work`, which must not raise, from a daemon thread of its own."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Answers] = loop.create_future()

    def settle(found: Answers) -> None:
        if not result.cancelled():
            result.set_result(found)

    def run() -> None:
        found = work()
        with suppress(RuntimeError):  # the server has ended meanwhile
            loop.call_soon_threadsafe(settle, found)

    threading.Thread(target=run, name="reward function", daemon=True).start()
    return await result
