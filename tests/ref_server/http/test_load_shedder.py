"""While the queue is full, most uploads are refused before they are decoded; all are admitted once there is room."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.http.app import create_app
from ref_server.http.load_shedder import MAX_PROBES, MEMORY_SECONDS, PROBE_SECONDS, LoadShedder
from ref_server.queue.errors import NoRoom
from ref_server.scoring.reference import NoReferenceModel
from ref_server.service.service import Service
from shared import wire
from shared.settings import from_values
from tests.harness.batches import random_batch

FULL = NoRoom("full", "run", 3)
Wait = Callable[[float], Awaitable[None]]


@contextmanager
def admission(shedder: LoadShedder) -> Iterator[None]:
    """An upload, as the middleware and the route treat it: NoRoom if it is not let in."""
    if refusal := shedder.refusal("run"):
        raise refusal
    with shedder.admission("run"):
        yield


def with_clock(play: Callable[[LoadShedder, Wait], Awaitable[None]]) -> None:
    """Runs `play` on a loop whose time passes only when it waits."""

    async def run() -> None:
        loop, now = asyncio.get_running_loop(), [1000.0]
        loop.time = lambda: now[0]

        async def wait(seconds: float) -> None:
            now[0] += seconds
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        await play(LoadShedder(), wait)

    asyncio.run(run())


async def count_admitted(shedder: LoadShedder, wait: Wait, error: Exception | None) -> int:
    """How many of a hundred uploads are let in, one after the other, which then end with this error."""
    admitted = 0
    for _ in range(100):
        with suppress(NoRoom, ValueError), admission(shedder):
            admitted += 1
            if error:
                raise error
        await wait(0)
    return admitted


def test_few_uploads_probe_a_full_queue() -> None:
    async def play(shedder: LoadShedder, wait: Wait) -> None:
        assert await count_admitted(shedder, wait, FULL) == 1 + MAX_PROBES
        with pytest.raises(NoRoom) as refused, admission(shedder):
            pass
        assert (str(refused.value), refused.value.run, refused.value.retry_after) == ("full", "run", 3)
        await wait(PROBE_SECONDS)
        assert await count_admitted(shedder, wait, FULL) == MAX_PROBES
        await wait(PROBE_SECONDS)
        for error in (None, ValueError("an invalid batch")):
            assert await count_admitted(shedder, wait, error) == 100, "those that find room use up no probes"

    with_clock(play)


def test_probes_at_the_same_time_are_bounded_until_the_fullness_is_forgotten() -> None:
    async def play(shedder: LoadShedder, wait: Wait) -> None:
        with ExitStack() as inside:
            for _ in range(100):
                inside.enter_context(admission(shedder))
            await count_admitted(shedder, wait, FULL)
            await wait(PROBE_SECONDS)
            for _ in range(MAX_PROBES):  # those of before are no probes
                inside.enter_context(admission(shedder))
            assert await count_admitted(shedder, wait, None) == 0
            await wait(MEMORY_SECONDS - PROBE_SECONDS - 0.01)
            assert await count_admitted(shedder, wait, None) == 0
            await wait(0.02)
            assert await count_admitted(shedder, wait, None) == 100

    with_clock(play)


def test_only_the_runs_that_were_full_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients name the runs, so their number has no other bound."""
    monkeypatch.setattr("ref_server.http.load_shedder.MAX_RUNS", 2)

    async def play(shedder: LoadShedder, wait: Wait) -> None:
        for run in ("first", "second", "third"):
            with suppress(NoRoom), shedder.admission(run):
                raise NoRoom("full", run, 3)
        refused = []
        for run in ("first", "second", "third"):
            with ExitStack() as probes:
                for _ in range(MAX_PROBES):
                    probes.enter_context(shedder.admission(run))
                refused += [run] if shedder.refusal(run) else []
        assert refused == ["second", "third"]

    with_clock(play)


def test_a_hundred_uploads_to_a_full_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ref_server.http.load_shedder.DELAY_SECONDS", 0.0)
    monkeypatch.setattr("ref_server.http.load_shedder.PROBE_SECONDS", 3600.0)
    monkeypatch.setattr("ref_server.http.load_shedder.MEMORY_SECONDS", 3600.0)
    config = from_values(ServeConfig, no_model=True, data_dir=tmp_path, queue={"max_batches": 2})
    service = Service(NoReferenceModel(config), open_queue(config), config)
    chance = random.Random(0)
    reached: list[str] = []
    put = service.queue.put
    monkeypatch.setattr(service.queue, "put", lambda upload: reached.append(upload.id) or put(upload))

    async def upload(client: httpx.AsyncClient, run: str = "run") -> httpx.Response:
        body = wire.encode(random_batch(chance, run))
        return await client.post("/v1/batches", content=body, headers={"Content-Type": wire.CONTENT_TYPE})

    async def play() -> None:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            service.start()
            first = await upload(client)
            assert first.status_code == 201
            for number, run in enumerate(("run", "other"), start=1):  # each run has probes
                answers = [await upload(client, run) for _ in range(100)]
                assert {answer.status_code for answer in answers} == {429}
                assert {answer.json()["error"]["code"] for answer in answers} == {"queue_full"}
                assert {answer.headers["Retry-After"] for answer in answers} == {"1"}
                assert len(reached) == 1 + number * (1 + MAX_PROBES)
            assert (await client.delete(f"/v1/batches/{first.json()['id']}")).status_code == 204
            loop = asyncio.get_running_loop()
            loop.time = lambda: time.monotonic() + 2 * 3600.0  # the fullness is forgotten
            assert (await upload(client)).status_code == 201
        service.close()

    asyncio.run(play())
