"""While the queue is full, most uploads are sent away before they are read, and all are let in once there is room."""

import asyncio
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.http.app import create_app
from ref_server.http.gate.load_shedder import (
    MAX_PROBES,
    MAX_RUNS,
    MEMORY_SECONDS,
    PROBES_PER_SECOND,
    LoadShedder,
    LoadShedders,
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


def upload_to(shedder: LoadShedder, full: NoRoom | None, code: str | None) -> bool:
    """Whether an upload is let in that then ends so."""
    if shedder.refusal():
        return False
    scope: dict[str, Any] = {"state": {}}
    with shedder.admission(scope):
        if full is not None:
            shedder.note(full)
        scope["state"]["error_code"] = code
    return True


def let_in(shedder: LoadShedder, full: NoRoom | None, code: str | None) -> int:
    """How many of a hundred are let in, one after the other."""
    return sum(upload_to(shedder, full, code) for _ in range(100))


def test_few_uploads_probe_a_full_queue() -> None:
    clock = Clock()
    shedder = LoadShedder(clock)
    full = NoRoom("full", "run", 3)
    assert let_in(shedder, full, "queue_full") == 1 + MAX_PROBES
    assert shedder.refusal() is full
    clock.now += 2 / PROBES_PER_SECOND
    assert let_in(shedder, full, "queue_full") == 2
    clock.now += MEMORY_SECONDS - 1
    assert let_in(shedder, full, "queue_full") == MAX_PROBES


@pytest.mark.parametrize("code", ["queue_full", "invalid_batch"])
def test_what_is_refused_for_other_reasons_closes_nothing(code: str) -> None:
    """A run may be full while others have room."""
    assert let_in(LoadShedder(Clock()), None, code) == 100


def test_uploads_that_find_room_use_up_no_probes() -> None:
    shedder = LoadShedder(Clock())
    assert upload_to(shedder, NoRoom("full", "run"), "queue_full")
    assert let_in(shedder, None, None) == 100


def test_probes_at_the_same_time_are_bounded() -> None:
    shedder = LoadShedder(Clock())
    scope: dict[str, Any] = {"state": {}}
    shedder.note(NoRoom("full", "run"))
    with ExitStack() as inside:
        for _ in range(int(MAX_PROBES)):
            assert shedder.refusal() is None
            inside.enter_context(shedder.admission(scope))
        assert shedder.refusal()
    assert shedder.refusal() is None


def test_a_crowd_that_is_inside_already_uses_up_no_probes() -> None:
    shedder = LoadShedder(Clock())
    scope: dict[str, Any] = {"state": {"error_code": "queue_full"}}
    with ExitStack() as inside:
        for _ in range(100):
            inside.enter_context(shedder.admission(scope))
        shedder.note(NoRoom("full", "run"))
    assert let_in(shedder, NoRoom("full", "run"), "queue_full") == MAX_PROBES


def test_all_are_let_in_a_while_after_there_was_no_room() -> None:
    clock = Clock()
    shedder = LoadShedder(clock)
    shedder.note(NoRoom("full", "run"))
    scope: dict[str, Any] = {"state": {}}
    with ExitStack() as inside:
        for _ in range(int(MAX_PROBES)):
            inside.enter_context(shedder.admission(scope))
        assert shedder.refusal()
        clock.now += MEMORY_SECONDS + 0.01
        assert shedder.refusal() is None


def test_each_run_has_a_shedder_of_its_own() -> None:
    shedders = LoadShedders(Clock())
    assert not shedders and shedders.of("run") is None
    shedders.note(NoRoom("full", "run"))
    full = shedders.of("run")
    assert shedders and full and shedders.of("other") is None and shedders.of(None) is None
    shedders.note(NoRoom("full again", "run"))
    assert shedders.of("run") is full, "its probes go on"


def test_the_runs_that_were_full_last_are_remembered() -> None:
    shedders = LoadShedders(Clock())
    for number in range(MAX_RUNS):
        shedders.note(NoRoom("full", str(number)))
    shedders.note(NoRoom("full", "0"))
    shedders.note(NoRoom("full", "new"))
    assert shedders.of("0") and shedders.of("new") and not shedders.of("1")


def test_a_hundred_uploads_to_a_full_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are refused alike, few of them by the queue; the next one after a place has become free is taken."""
    monkeypatch.setattr("ref_server.http.gate.load_shedder.DELAY_SECONDS", 0.0)
    monkeypatch.setattr("ref_server.http.gate.load_shedder.PROBES_PER_SECOND", 0.0)
    monkeypatch.setattr("ref_server.http.gate.load_shedder.MEMORY_SECONDS", 3600.0)
    config = from_values(ServeConfig, no_model=True, data_dir=tmp_path, queue={"max_batches": 2})
    service = Service(NoReferenceModel(config.max_batch_tokens), open_queue(config), config)
    chance = random.Random(0)
    asked = []
    put = service.queue.put
    monkeypatch.setattr(service.queue, "put", lambda upload: asked.append(upload.id) or put(upload))

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
            assert len(asked) == 2 + MAX_PROBES
            answers = [await upload(client, "other") for _ in range(100)]
            assert {answer.status_code for answer in answers} == {429}
            assert len(asked) == 2 * (1 + MAX_PROBES) + 1, "another run asks for itself"
            assert (await client.delete(f"/v1/batches/{first.json()['id']}")).status_code == 204
            monkeypatch.setattr("ref_server.http.gate.load_shedder.MEMORY_SECONDS", 0.0)
            assert (await upload(client)).status_code == 201
        service.close()

    asyncio.run(play())
