"""Published weights under cut connections, server kills and a full disk: readers see only whole versions."""

import asyncio
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

from policy_trainer.weights.published.download import fetch
from shared.api import WeightsName
from shared.client import RefServerClient
from tests.chaos.stage import Proof, Stage, at_work
from tests.harness.disk import SmallDisk, small_disk
from tests.harness.processes import until
from tests.harness.proxy import LoopbackProxy
from tests.harness.server import Server


class CuttingProxy(LoopbackProxy):
    """cuts: how many there were so far."""

    def __init__(self, port: int, longest: int, seed: int) -> None:
        """longest: most bytes that a connection carries while `cutting`."""
        super().__init__(port)
        self._longest = longest
        self._random = random.Random(seed)
        self.cutting = True
        self.cuts = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        left = [self._random.randrange(self._longest)]
        ways = [asyncio.ensure_future(self._pass(*way, left)) for way in ((reader, to_server), (server, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.transport.abort()
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


BAR = "200 transfers cut, the server killed, its disk full: every version that is seen is whole, and the last one comes"

_RUN, _LINEAGE = "weights", "first"
_MIB = 2**20
_DISK = 96 * _MIB
_SIZES = {"config.json": 700, "model.safetensors": 3 * _MIB}
_LONGEST = 6 * _MIB
_READERS = 3


class _Over(Exception):
    """The test is over: clients that wait for the server end."""


def content(version: int, file: str) -> bytes:
    """The bytes of a file of a version: no two versions have any in common."""
    return random.Random(f"{version} {file}").randbytes(_SIZES[file])


class Play:
    """One publisher and some readers, through a proxy. faults: what was seen that must not be."""

    def __init__(self, url: str, directory: Path) -> None:
        self._url = url
        self._directory = directory
        self.published = 0
        self.refused = 0
        self.seen: list[list[int]] = [[] for _ in range(_READERS)]
        self.faults: list[str] = []

    @contextmanager
    def _client(self, over: threading.Event) -> Iterator[RefServerClient]:
        def waiting(reason: str, seconds: float) -> None:
            self.refused += "disk is full" in reason
            if over.is_set():
                raise _Over

        with suppress(_Over), RefServerClient(self._url, patience=None, on_wait=waiting) as client:
            yield client

    def publish(self, over: threading.Event) -> None:
        with self._client(over) as client:
            while not over.is_set():
                name = WeightsName(_RUN, _LINEAGE, 0, self.published + 1)
                directory = self._directory / "published"
                directory.mkdir(parents=True, exist_ok=True)
                for file in _SIZES:
                    (directory / file).write_bytes(content(name.version, file))
                files = {file: client.put_weights(name, directory / file) for file in _SIZES}
                client.commit_weights(name, files, {"says": name.version})
                self.published = name.version

    def read(self, number: int, over: threading.Event) -> None:
        directory, after = self._directory / f"reader-{number}", (0, 0)
        with self._client(over) as client:
            while not over.is_set():
                newest = client.newest_weights(_RUN, _LINEAGE, after=after, wait_seconds=1)
                if newest is None:
                    continue
                place = fetch(client, newest, directory)
                if place is None:
                    continue
                self._judge(newest.version, newest.words == {"says": newest.version}, place)
                after = newest.name.order
                self.seen[number].append(newest.version)
                shutil.rmtree(place)

    def _judge(self, version: int, words: bool, place: Path) -> None:
        right = {file: sha256(content(version, file)).digest() for file in _SIZES}
        got = {path.name: sha256(path.read_bytes()).digest() for path in place.iterdir()}
        if got != right or not words:
            self.faults.append(f"version {version} was not what was published")


def run(stage: Stage) -> Proof:
    """Cuts ten times as many transfers as there are cycles; kills, and fills the disk, a fifth as often."""
    directory, cuts, troubles = stage.directory, 10 * stage.cycles, max(1, stage.cycles // 5)
    with small_disk(directory / "server", _DISK) as disk, stage.serving() as first:
        server: Server = first
        with CuttingProxy(server.port, _LONGEST, stage.seed) as proxy:
            play = Play(proxy.url, directory)
            try:
                with at_work([play.publish, *(partial(play.read, number) for number in range(_READERS))]):
                    for number in range(1, troubles + 1):
                        goal = cuts * number // troubles
                        until(lambda goal=goal: proxy.cuts >= goal or play.faults, "cuts", server)
                        _fill(disk, play)
                        server.kill()
                        server = server.again().until_ready()
                    proxy.cutting = False
                    last = play.published + 2
                    until(
                        lambda: play.faults or all(last <= max(seen, default=0) for seen in play.seen),
                        "the last",
                        server,
                    )
            finally:
                server.kill()
        faults = [*play.faults, *faults_on_disk(directory / "server" / "weights")]
    faults += [f"reader {number} went back" for number, seen in enumerate(play.seen) if seen != sorted(set(seen))]
    faults += [] if play.refused else ["no upload was refused: the disk was never full"]
    figures = {
        "cuts": proxy.cuts, "kills": troubles, "refused (507)": play.refused, "published": play.published,
        "read": sum(map(len, play.seen)),
    }  # fmt: skip
    return Proof(faults, figures)


def _fill(disk: SmallDisk, play: Play) -> None:
    """Fills the disk until an upload was refused."""
    disk.fill()
    before, deadline = play.refused, time.monotonic() + 60
    while play.refused == before and time.monotonic() < deadline:
        time.sleep(0.05)
    disk.clear()


def faults_on_disk(root: Path) -> list[str]:
    """Of a server that was killed: what a reader could see there must be whole."""
    faults = []
    for manifest in root.glob("*/*/*/*/.manifest.json"):
        version = int(manifest.parent.name)
        for file in _SIZES:
            if (manifest.parent / file).read_bytes() != content(version, file):
                faults.append(f"version {version} is damaged on the disk: {file}")
    return faults
