"""A proxy on loopback that cuts connections after a random number of bytes, in either direction."""

import asyncio
import random
import socket
import threading


class CuttingProxy:
    """Runs on a thread of its own while the block runs; clients connect to `url`. cuts: how many there were so far."""

    def __init__(self, port: int, longest: int, seed: int) -> None:
        """port: the server's. longest: most bytes that a connection carries while `cutting`."""
        self._port = port
        self._longest = longest
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cutting = True
        self.cuts = 0
        self._running = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="proxy", daemon=True)

    def __enter__(self) -> "CuttingProxy":
        self._thread.start()
        self._running.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, sock=self._listener)
        self._running.set()
        await self._stop.wait()
        server.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            to_client.transport.abort()
            return
        left = [self._random.randrange(self._longest)]
        ways = [asyncio.ensure_future(self._pass(*way, left)) for way in ((client, to_server), (server, to_client))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            to_client.transport.abort()
            to_server.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: list[int]) -> None:
        """left: bytes that the connection still carries, in both directions together."""
        while data := await reader.read(65_536):
            if self.cutting and len(data) > left[0]:
                writer.write(data[: left[0]])
                self.cuts += 1
                return
            left[0] -= len(data)
            writer.write(data)
            await writer.drain()
