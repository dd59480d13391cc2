"""While the queue is full, most uploads are refused before they are decoded; all are admitted once there is room."""

import asyncio
import random
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.http.app import create_app
from ref_server.http.load_shedder import (
    MAX_PROBES,
    MEMORY_SECONDS,
    PROBES_PER_SECOND,
    LoadShedder,
)
from ref_server.queue.errors import NoRoom
from ref_server.scoring.reference import NoReferenceModel
from ref_server.service.service import Service
from shared import wire
from shared.settings import from_values
from tests.chaos.batches import random_batch


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def full_for(run: str = "run") -> NoRoom:
    return NoRoom("full", run, 3)


def upload_to(shedder: LoadShedder, error: Exception | None, run: str = "run") -> bool:
    """Whether an upload is let in, which then ends with this error."""
    if shedder.refusal(run):
        return False
    with suppress(NoRoom, ValueError), shedder.admission(run):
        if error is not None:
            raise error
    return True


def count_admitted(shedder: LoadShedder, error: Exception | None) -> int:
    """How many of a hundred uploads are let in, one after the other."""
    return sum(upload_to(shedder, error) for _ in range(100))


def test_few_uploads_probe_a_full_queue() -> None:
    clock = Clock()
    shedder = LoadShedder(clock)
    assert count_admitted(shedder, full_for()) == 1 + MAX_PROBES
    refusal = shedder.refusal("run")
    assert refusal and (str(refusal), refusal.run, refusal.retry_after) == ("full", "run", 3)
    clock.now += 2 / PROBES_PER_SECOND
    assert count_admitted(shedder, full_for()) == 2
    clock.now += MEMORY_SECONDS - 1
    assert count_admitted(shedder, full_for()) == MAX_PROBES


@pytest.mark.parametrize("error", [None, ValueError("an invalid batch")])
def test_uploads_that_find_room_use_up_no_probes(error: Exception | None) -> None:
    shedder = LoadShedder(Clock())
    assert upload_to(shedder, full_for())
    assert count_admitted(shedder, error) == 100


def test_probes_at_the_same_time_are_bounded_until_the_fullness_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ref_server.http.load_shedder.PROBES_PER_SECOND", 0.0)
    clock = Clock()
    shedder = LoadShedder(clock)
    upload_to(shedder, full_for())
    with ExitStack() as inside:
        for _ in range(int(MAX_PROBES)):
            assert shedder.refusal("run") is None
            inside.enter_context(shedder.admission("run"))
        assert shedder.refusal("run")
    assert shedder.refusal("run") is None
    with ExitStack() as inside:
        for _ in range(int(MAX_PROBES)):
            inside.enter_context(shedder.admission("run"))
        assert shedder.refusal("run")
        clock.now += MEMORY_SECONDS + 0.01
        assert shedder.refusal("run") is None


def test_uploads_that_were_let_in_before_use_up_no_probes() -> None:
    shedder = LoadShedder(Clock())
    with ExitStack() as inside:
        for _ in range(100):
            inside.enter_context(shedder.admission("run"))
        upload_to(shedder, full_for())
    assert count_admitted(shedder, full_for()) == MAX_PROBES


def test_a_hundred_uploads_to_a_full_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ref_server.http.load_shedder.DELAY_SECONDS", 0.0)
    monkeypatch.setattr("ref_server.http.load_shedder.PROBES_PER_SECOND", 0.0)
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
            answers = [await upload(client) for _ in range(100)]
            assert {answer.status_code for answer in answers} == {429}
            assert {answer.json()["error"]["code"] for answer in answers} == {"queue_full"}
            assert {answer.headers["Retry-After"] for answer in answers} == {"1"}
            assert len(reached) == 2 + MAX_PROBES
            answers = [await upload(client, "other") for _ in range(100)]
            assert {answer.status_code for answer in answers} == {429}
            assert len(reached) == 2 * (1 + MAX_PROBES) + 1, "each run has probes"
            assert (await client.delete(f"/v1/batches/{first.json()['id']}")).status_code == 204
            monkeypatch.setattr("ref_server.http.load_shedder.MEMORY_SECONDS", 0.0)
            assert (await upload(client)).status_code == 201
        service.close()

    asyncio.run(play())
