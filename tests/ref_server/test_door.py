"""While the queue is full, most uploads are sent away before they are read, and all are let in once there is room."""

import asyncio
import random
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from ref_server.app import create_app
from ref_server.config import ServeConfig
from ref_server.door import MAX_SCOUTS, MEMORY_SECONDS, SCOUTS_PER_SECOND, Door
from ref_server.no_model import NoReference
from ref_server.queue.interface import NoRoom, QueueFull
from ref_server.service import Service
from ref_server.stores import open_queue
from shared import wire
from shared.settings import from_values
from tests.chaos.batches import random_batch


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def fail(door: Door, error: Exception) -> None:
    with suppress(type(error)), door.admission():
        raise error


def closed_after(door: Door, error: Exception, most: int = 100) -> int:
    """How many uploads are let in, one after the other, that all end so."""
    for count in range(most):
        if door.closed():
            return count
        fail(door, error)
    return most


def test_few_find_out_that_the_queue_is_full() -> None:
    clock = Clock()
    door = Door(clock)
    assert closed_after(door, NoRoom("full", 3)) == MAX_SCOUTS
    told = door.closed()
    assert told is not None
    assert (str(told), told.retry_after) == ("full", 3)
    clock.now += 2 / SCOUTS_PER_SECOND
    assert closed_after(door, NoRoom("full")) == 2
    clock.now += 60
    assert closed_after(door, NoRoom("full")) == MAX_SCOUTS


@pytest.mark.parametrize("error", [QueueFull("of one run"), ValueError("wrong")])
def test_what_is_refused_for_other_reasons_closes_nothing(error: Exception) -> None:
    assert closed_after(Door(Clock()), error) == 100


def test_uploads_that_find_room_use_up_nothing() -> None:
    door = Door(Clock())
    fail(door, NoRoom("full"))
    for _ in range(100):
        assert door.closed() is None
        with door.admission():
            pass


def test_no_more_at_the_same_time_than_may_find_out() -> None:
    clock = Clock()
    door = Door(clock)
    fail(door, NoRoom("full"))
    inside = [door.admission() for _ in range(int(MAX_SCOUTS) - 1)]
    for each in inside:
        each.__enter__()
    assert door.closed()
    inside.pop().__exit__(None, None, None)
    assert door.closed() is None


def test_all_are_let_in_a_while_after_there_was_room() -> None:
    clock = Clock()
    door = Door(clock)
    fail(door, NoRoom("full"))
    inside = [door.admission() for _ in range(100)]
    for each in inside:
        each.__enter__()
    assert door.closed()
    clock.now += MEMORY_SECONDS + 0.01
    assert door.closed() is None


def test_a_hundred_uploads_to_a_full_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are refused alike, few of them by the queue; the next one after a place has become free is taken."""
    monkeypatch.setattr("ref_server.door.DELAY_SECONDS", 0.0)
    monkeypatch.setattr("ref_server.door.SCOUTS_PER_SECOND", 0.0)
    config = from_values(ServeConfig, no_model=True, data_dir=tmp_path, queue={"max_batches": 1})
    service = Service(NoReference(config.max_batch_tokens), open_queue(config), config)
    chance = random.Random(0)
    asked = []
    put = service.queue.put
    monkeypatch.setattr(service.queue, "put", lambda upload: asked.append(upload.id) or put(upload))

    async def upload(client: httpx.AsyncClient) -> httpx.Response:
        body = wire.encode(random_batch(chance, "run"))
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
            assert len(asked) == 1 + MAX_SCOUTS
            assert (await client.delete(f"/v1/batches/{first.json()['id']}")).status_code == 204
            monkeypatch.setattr("ref_server.door.MEMORY_SECONDS", 0.0)
            assert (await upload(client)).status_code == 201
        service.close()

    asyncio.run(play())
