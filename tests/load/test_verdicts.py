"""The verdicts of a soak find growth but not noise, and the load client parses HTTP."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.load.connection import Client, Tally, Uploads, get
from tests.load.crew import Played
from tests.load.report import Figure
from tests.load.samples import Sample
from tests.load.soak import judge

SAMPLES = 180
STEADY = Sample(at=0, resident=400, files=30, threads=20, data=2, wal=4, known=1000, done=900)


def soaked(changes: Mapping[str, float], how: object = 201) -> list[Figure]:
    """The verdicts on a server whose figures grow by `changes` over the whole time, with noise in its memory."""
    chance, taken = random.Random(0), []
    for number in range(SAMPLES):
        fields = {name: getattr(STEADY, name) + by * number / SAMPLES for name, by in changes.items()}
        wavering = {"resident": fields.get("resident", STEADY.resident) + chance.uniform(-10, 10)}
        taken.append(replace(STEADY, at=number * 10, **fields | wavering))
    tally = Tally()
    tally.note("upload", how, 0.1)
    return judge(taken, {"mixture": Played(tally, 1800, 0.1), "slow": Played({}, 1800, 0.1)})


def missed(figures: list[Figure]) -> set[str]:
    return {figure.what for figure in figures if not figure.passed}


def test_a_steady_server_passes() -> None:
    assert not missed(soaked({}))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"resident": 60}, "resident MiB"),
        ({"data": 12}, "data directory MiB, without the log"),
        ({"files": 60}, "open files"),
        ({"threads": 40}, "threads"),
        ({"wal": 60}, "write-ahead log MiB"),
    ],
)
def test_growth_is_found(change: dict[str, float], what: str) -> None:
    assert missed(soaked(change)) == {what}


@pytest.mark.parametrize("how", [500, "ConnectionError"])
def test_5xx_and_missing_answers_are_found(how: object) -> None:
    assert missed(soaked({}, how)) == {"answers 5xx, or none at all"}


def test_every_upload_has_an_id_of_its_own() -> None:
    id = "01890a5d-ac96-774b-bcce-b302099a8057"
    uploads = Uploads(b"before " + id.encode() + b" after", id)
    first, second = uploads.next(), uploads.next()
    assert first.endswith(b"before 01890a5d-ac96-774b-bcce-000000000001 after")
    assert len(first) == len(second)
    assert first != second


def test_answers_are_parsed() -> None:
    """An answer in pieces, one without a body, and none when the server closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in (b"HTTP/1.1 200 OK\r\nContent-", b"Length: 5\r\nBatch-Id: Ab\r\n\r\nhe", b"llo"):
            writer.write(piece)
            await asyncio.sleep(0.01)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def play() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        tally = Tally()
        client = Client(server.sockets[0].getsockname()[1], tally)
        first = await client.ask("a", get("/"))
        assert first is not None
        assert (first.status, first.body, first.header("batch-id")) == (200, b"hello", "Ab")
        second = await client.ask("b", get("/"))
        assert second is not None
        assert (second.status, second.body) == (204, b"")
        assert await client.ask("c", get("/")) is None
        assert dict(tally.answers) == {"a 200": 1, "b 204": 1, "c ConnectionError": 1}
        client.close()
        server.close()
        await server.wait_closed()

    asyncio.run(play())
