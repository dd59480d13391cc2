"""Several batches in one upload over HTTP."""

import asyncio
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ref_server.cli.serve import open_queue
from ref_server.config import QueueConfig, ServeConfig
from ref_server.http.app import create_app
from ref_server.http.load_shedder import MAX_PROBES
from ref_server.scoring.reference import NoReferenceModel
from ref_server.service.service import Service
from shared import wire
from shared.api import MAX_UPLOADS, MAX_UPLOADS_BYTES, Uploaded, UploadResult, UploadResults
from shared.batch import Batch
from shared.client import RefServerClient, RefServerError
from tests.harness.processes import until
from tests.ref_server.calls import MakeService, Rollout, Serve, bearer, error, upload

TOGETHER = {"Content-Type": wire.UPLOADS_CONTENT_TYPE}


@pytest.fixture(scope="module")
def http(make_service: MakeService, serve: Serve) -> Iterator[httpx.Client]:
    with serve(make_service()) as client:
        yield client


def upload_together(http: httpx.Client, *batches: Batch | bytes, **headers: str) -> list[UploadResult]:
    bodies = [batch if isinstance(batch, bytes) else wire.encode(batch) for batch in batches]
    answer = http.post("/v1/batches", content=wire.encode_uploads(bodies), headers=TOGETHER | headers)
    assert answer.status_code == 200, answer.text
    return UploadResults.model_validate_json(answer.content).results


def test_each_is_admitted_and_a_repetition_is_harmless(http: httpx.Client, rollout: Rollout) -> None:
    batches = [rollout() for _ in range(3)]
    for created in (True, False):
        uploaded = [result.uploaded for result in upload_together(http, *batches)]
        assert [each and (each.id, each.created) for each in uploaded] == [(batch.id, created) for batch in batches]
    assert upload(http, batches[0]).status_code == 200


def test_one_that_is_refused_does_not_concern_the_others(http: httpx.Client, rollout: Rollout) -> None:
    good, known = rollout(), rollout()
    upload(http, known)
    other_content = rollout(id=known.id, run="another")
    results = upload_together(http, b"no batch", good, other_content, b"")
    assert [each.error and each.error.code for each in results] == ["invalid_batch", None, "conflict", "invalid_batch"]
    assert results[1].uploaded and results[1].uploaded.id == good.id
    assert results[0].error and results[0].error.request_id


def test_a_token_of_one_run_uploads_nothing_to_others(
    make_service: MakeService, serve: Serve, rollout: Rollout, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("upload mine-0123456789abcdef name=mine run=mine\n")
    with serve(make_service(token_file=tmp_path / "tokens")) as http:
        batches = rollout(run="mine"), rollout(run="yours")
        mine, yours = upload_together(http, *batches, **bearer("mine-0123456789abcdef"))
        assert mine.uploaded and yours.error and yours.error.code == "forbidden"


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (b"", 422, "1 to 64 batches"),
        (bytes(4) * (MAX_UPLOADS + 1), 422, "1 to 64 batches"),
        (b"\0\0", 422, "a length of 4 bytes is claimed"),
        (b"\xff\xff\xff\xffx", 422, "a batch of 4294967295 bytes is claimed"),
        (bytes(MAX_UPLOADS_BYTES + 1), 413, "at most 4194304 bytes"),
    ],
)
def test_what_is_no_such_body(http: httpx.Client, body: bytes, status: int, why: str) -> None:
    assert why in error(http.post("/v1/batches", content=body, headers=TOGETHER), status)["message"]


def test_a_full_queue_takes_what_fits_and_the_client_waits_with_the_rest(
    make_service: MakeService, serve: Serve, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ref_server.http.routes.batches.DELAY_SECONDS", 0.01)
    batches = [rollout() for _ in range(5)]
    waits: list[str] = []
    with serve(make_service(queue=QueueConfig(max_batches=2))) as http:

        def make_room(reason: str, seconds: float) -> None:
            waits.append(reason)
            for batch in until(lambda: http.get("/v1/batches", params={"state": "ready"}).json()["batches"]):
                assert http.delete(f"/v1/batches/{batch['id']}").status_code == 204

        with RefServerClient(str(http.base_url), patience=60, on_wait=make_room) as client:
            uploaded = client.upload_several(batches)
    assert [not isinstance(each, RefServerError) and each.id for each in uploaded] == [batch.id for batch in batches]
    assert waits and all("429" in reason for reason in waits)


def test_one_upload_leaves_room_for_others(
    make_service: MakeService, serve: Serve, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service()
    admit, held, at_once = service.admit, threading.Event(), threading.Semaphore(0)

    def slowly(body: bytes, *rest: Any) -> Uploaded:
        at_once.release()
        assert held.wait(60)
        return admit(body, *rest)

    with serve(service) as http, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(service, "admit", slowly)
        together = pool.submit(upload_together, http, *(rollout() for _ in range(MAX_UPLOADS)))
        for _ in range(16):
            assert at_once.acquire(timeout=60)
        assert not at_once.acquire(timeout=0.2), "no more at once"
        monkeypatch.setattr(service, "admit", admit)
        assert upload(http, rollout()).status_code == 201
        monkeypatch.setattr(service, "admit", slowly)
        held.set()
        assert all(each.uploaded for each in together.result(timeout=60))


def test_a_large_batch_is_sent_once_and_by_itself(serve: Serve, rollout: Rollout, tmp_path: Path) -> None:
    config = ServeConfig(no_model=True, data_dir=tmp_path, max_batch_tokens=10**6)
    service = Service(NoReferenceModel(config), open_queue(config), config)
    large = rollout(lengths=(300_000, 300_000))
    assert len(wire.encode(large)) > MAX_UPLOADS_BYTES
    with serve(service) as http, RefServerClient(str(http.base_url)) as client:
        (uploaded,) = client.upload_several([large])
        counted = http.get("/metrics").text
    assert isinstance(uploaded, Uploaded) and uploaded.created
    assert re.search(r'http_request_seconds_count{method="POST",route="/v1/batches"} 1.0', counted)


def test_while_the_queue_is_full_few_of_them_are_decoded(
    make_service: MakeService, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ref_server.http.routes.batches.DELAY_SECONDS", 0.0)
    service = make_service(queue=QueueConfig(max_batches=2))
    decoded: list[str] = []
    put = service.queue.put
    monkeypatch.setattr(service.queue, "put", lambda upload: decoded.append(upload.id) or put(upload))

    async def play() -> list[str]:
        answer = httpx.Response(0)
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for _ in range(3):
                content = wire.encode_uploads([wire.encode(rollout()) for _ in range(60)])
                answer = await client.post("/v1/batches", content=content, headers=TOGETHER)
        service.queue.close()
        return [result["error"]["code"] for result in answer.json()["results"]]

    assert asyncio.run(play()) == ["queue_full"] * 60
    assert len(decoded) <= 60 + 2 * MAX_PROBES
