"""uvicorn in a thread of the test's process, on a real socket."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from ref_server.http.server import Loop


def listen() -> socket.socket:
    """A socket on a free port of this machine."""
    # The protocol is named, or asyncio would not turn off Nagle's algorithm and every answer would take 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    return listener


class _Server(uvicorn.Server):
    """Ends within a hundredth of a second, where uvicorn's looks every tenth."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(0.01)


@contextmanager
def serving(config: uvicorn.Config, listener: socket.socket) -> Iterator[int]:
    """The port of a server, which runs while the block does. Closes the listener."""
    server = _Server(config)

    def run() -> None:
        with asyncio.Runner(loop_factory=Loop) as runner:
            runner.run(server.serve([listener]))

    thread = threading.Thread(target=run)
    with listener:
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
