"""The byte protocol on a running server: answers to clients, and their batches."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from transformers import PreTrainedModel

from ref_server.metrics import Count
from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.records import Claim, Payload
from tests.harness.processes import until
from tests.ref_server.calls import MakeService, Rollout, Serve, error, lease
from tests.ref_server.calls import upload as upload_batch
from tests.ref_server.legacy.blobs import GEN_LOGPS, INPUTS, REWARDS, upload
from tests.ref_server.legacy.simple_grpo import bytes_list_to_list, bytes_to_tensor, make_bytes_list, tensor_to_bytes
from tests.ref_server.sockets import connected


@pytest.fixture(scope="module")
def legacy(make_service: MakeService, serve: Serve) -> Iterator[httpx.Client]:
    """One server for the tests that leave it empty."""
    with serve(make_service(legacy=True, max_body_mib=1, max_batch_tokens=200)) as http:
        yield http


def get(http: httpx.Client) -> list[bytes]:
    """The next frame, once there is one."""
    frame = until(lambda: (answer := http.get("/get").raise_for_status().content) != b"empty" and answer)
    return bytes_list_to_list(frame)


def until_ready(http: httpx.Client, count: int) -> None:
    params = {"run": "legacy", "state": "ready"}
    until(lambda: len(http.get("/v1/batches", params=params).json()["batches"]) >= count)


def shared_prompt(rows: int = 3, prompt: int = 4, length: int = 6, seed: int = 0) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, 260, size=(rows, prompt + length))
    ids[:, :prompt] = ids[0, :prompt]
    return torch.from_numpy(ids)


def of(inputs: torch.Tensor, plen: int, **parts: torch.Tensor) -> bytes:
    tensors = {"inputs": inputs, "rewards": torch.arange(len(inputs)).float(), **parts}
    blobs = {name: tensor_to_bytes(tensor) for name, tensor in tensors.items()}
    return upload(base=json.dumps({"plen": plen}).encode(), **blobs)


def test_a_batch_goes_through(legacy: httpx.Client) -> None:
    rewards = torch.tensor([float("nan"), 0.5], dtype=torch.float64)
    gen_logps = GEN_LOGPS.bfloat16()
    body = upload(rewards=tensor_to_bytes(rewards), gen_logps=tensor_to_bytes(gen_logps), base=b'{"plen": 3 , "a":1}')
    answer = legacy.post("/upload", content=body)
    assert (answer.status_code, answer.content) == (200, b"tensor")
    base, *blobs = get(legacy)
    inputs, got_rewards, refs, got_gen_logps = map(bytes_to_tensor, blobs)
    assert base == b'{"plen": 3 , "a":1}'
    assert torch.equal(inputs, INPUTS)
    assert torch.equal(got_rewards.isnan(), rewards.isnan())
    assert (got_rewards[1], got_rewards.dtype) == (0.5, torch.float64)
    assert (refs.shape, refs.dtype) == ((2, 2), torch.float32)
    assert (got_gen_logps.dtype, got_gen_logps.tolist()) == (torch.bfloat16, gen_logps.tolist())
    assert legacy.get("/get").content == b"empty", "it is delivered once"


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "multipart/form-data"}])
def test_any_content_type_and_chunked_bodies_are_accepted(legacy: httpx.Client, headers: dict[str, str]) -> None:
    body = upload()
    chunks = (body[start : start + 1000] for start in range(0, len(body), 1000))
    answer = legacy.post("/upload", content=chunks, headers=headers)
    assert (answer.status_code, answer.content) == (200, b"tensor")
    assert len(get(legacy)) == 4


def test_log_probs_are_those_of_the_original_server(legacy: httpx.Client, model: PreTrainedModel) -> None:
    """Its computation, in float32: logits of all rows, log-softmax, gather; pads are tokens like any other."""
    inputs = shared_prompt(seed=3)
    inputs[1, 7:] = inputs[2, 5:] = 257
    legacy.post("/upload", content=of(inputs, 4)).raise_for_status()
    refs = bytes_to_tensor(get(legacy)[3])
    with torch.inference_mode():
        logps = model(inputs).logits[:, :-1].log_softmax(-1)
    expected = logps.gather(2, inputs[:, 1:, None])[:, 3:, 0]
    torch.testing.assert_close(refs, expected, atol=1e-4, rtol=0)


def test_string_mode_is_answered_and_not_kept(legacy: httpx.Client) -> None:
    before = legacy.get("/v1/batches").json()
    answer = legacy.post("/upload", content=make_bytes_list([b'{"Q": "2+3?", "As": []}', tensor_to_bytes(REWARDS)]))
    assert (answer.status_code, answer.content) == (200, b"tensor")
    assert legacy.get("/v1/batches").json() == before


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "ends at byte 0"),
        (b"\xff" * 8, "claims 4294967295 parts"),
        (upload()[:-1], "part 2 claims"),
        (upload(inputs=tensor_to_bytes(INPUTS - 1)), "must lie in [0, "),
        (upload(inputs=tensor_to_bytes(INPUTS + 2**40)), "must lie in [0, "),
        (of(shared_prompt(rows=40), 4), "inputs have 244 tokens to score; max_batch_tokens is 200"),
        (of(shared_prompt(rows=1, prompt=100, length=101), 100), "inputs have 201 tokens"),
    ],
)
def test_a_malformed_upload_is_refused_with_the_reason(legacy: httpx.Client, body: bytes, reason: str) -> None:
    answer = legacy.post("/upload", content=body)
    assert answer.status_code == 400
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert reason in answer.text
    assert legacy.get("/get").content == b"empty"


def test_other_methods_take_no_batch(legacy: httpx.Client) -> None:
    legacy.post("/upload", content=upload()).raise_for_status()
    until_ready(legacy, 1)
    for method, path, status in (
        ("HEAD", "/get", 405),
        ("POST", "/get", 405),
        ("GET", "/upload", 405),
        ("GET", "/nothing", 404),
    ):
        answer = legacy.request(method, path)
        assert answer.status_code == status
        assert "html" not in answer.headers["Content-Type"]
    assert len(get(legacy)) == 4, "it is still there"


def test_browsers_take_nothing(legacy: httpx.Client) -> None:
    legacy.post("/upload", content=upload()).raise_for_status()
    until_ready(legacy, 1)
    assert legacy.get("/get", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert legacy.get("/get", headers={"Origin": "http://evil.example"}).status_code == 403
    assert legacy.get("/get", headers={"Host": "evil.example"}).status_code == 403
    assert len(get(legacy)) == 4


def test_the_run_legacy_is_reserved(legacy: httpx.Client, rollout: Rollout) -> None:
    assert error(upload_batch(legacy, rollout(run="legacy")), 422)["field"] == "run"
    assert error(lease(legacy, "legacy"), 422)["field"] == "run"
    legacy.post("/upload", content=upload()).raise_for_status()
    until_ready(legacy, 1)
    assert lease(legacy, wait_seconds=0).status_code == 204
    [batch] = legacy.get("/v1/batches", params={"run": "legacy", "state": "ready"}).json()["batches"]
    assert error(legacy.get(f"/v1/batches/{batch['id']}/tokens"), 422)["field"] == "run"
    assert len(get(legacy)) == 4


def test_the_routes_need_the_option(http: httpx.Client) -> None:
    assert http.post("/upload", content=upload()).status_code == 404
    assert http.get("/get").status_code == 404


def test_a_full_queue_drops_the_oldest(make_service: MakeService, serve: Serve) -> None:
    service = make_service(legacy=True, queue={"max_batches": 4})
    with serve(service) as http:
        for number in range(5):
            body = of(shared_prompt(seed=number), 4, rewards=torch.full((3,), float(number)))
            http.post("/upload", content=body).raise_for_status()
            until_ready(http, min(number + 1, 2))
        assert service.queue.activity.counts()[Count.EXPIRED_DISPLACED] == 3
        assert [bytes_to_tensor(get(http)[2])[0].item() for _ in range(2)] == [4, 3]
        assert http.get("/get").content == b"empty"


class Failing:
    """A queue whose legacy operations raise an error."""

    def __init__(self, queue: Any, error: Exception) -> None:
        self._queue, self.error = queue, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def put_displacing(self, upload: Any) -> list[str]:
        raise self.error

    def take(self, run: str) -> bytes | None:
        raise self.error


@pytest.mark.parametrize(("error", "status"), [(StorageFull("full"), 507), (StorageBroken("broken"), 503)])
def test_a_store_that_fails(make_service: MakeService, serve: Serve, error: Exception, status: int) -> None:
    with serve(make_service(legacy=True, wrap=lambda queue: Failing(queue, error))) as http:
        assert http.post("/upload", content=upload()).status_code == status
        assert http.get("/get").content == b"empty"  # trainers would take an error for a frame


class Forgetful:
    """A queue that has lost the scores of its batches."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def take(self, run: str) -> Payload:
        return Payload(upload(), None)


def test_a_batch_without_scores_is_logged(make_service: MakeService, serve: Serve) -> None:
    with serve(make_service(legacy=True, wrap=Forgetful)) as http, capture_logs() as logs:
        assert http.get("/get").content == b"empty"
    assert [(each["log_level"], each["error"]) for each in logs] == [
        ("error", "the newest batch, which is now deleted, was ready without scores")
    ]


def test_a_draining_server_takes_no_upload(make_service: MakeService, serve: Serve) -> None:
    service = make_service(legacy=True)
    with serve(service) as http:
        http.post("/upload", content=upload()).raise_for_status()
        until_ready(http, 1)
        service.drain()
        assert http.post("/upload", content=upload()).status_code == 503
        assert len(get(http)) == 4
        assert http.get("/get").content == b"empty"


class Damaging:
    """A queue whose oldest batch is damaged when it is claimed."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def claim(self, max_tokens: int, reference_version: int) -> list[Claim]:
        oldest = self._queue.list(None, None, 1, None).batches
        claims = self._queue.claim(max_tokens, reference_version)
        return [replace(claim, body=claim.body[:-1]) if claim.id == oldest[0].id else claim for claim in claims]


def test_a_batch_that_cannot_be_scored_delays_no_other(make_service: MakeService, serve: Serve) -> None:
    with serve(make_service(legacy=True, wrap=Damaging)) as http:
        for _ in range(3):
            http.post("/upload", content=upload()).raise_for_status()
        assert len([get(http), get(http)]) == 2
        until(lambda: http.get("/v1/batches").json()["batches"][0]["state"] == "dead")
        assert http.get("/get").content == b"empty"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /get HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(upload()), upload()),
        b"POST /upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(upload()), upload()[:99]),
    ],
    ids=["get", "upload", "half an upload"],
)
def test_clients_that_go_away_do_no_harm(legacy: httpx.Client, sent: bytes) -> None:
    for _ in range(20):  # more than there are threads for it
        with connected(legacy) as client:
            client.sendall(sent)
    until(
        lambda: legacy.post("/upload", content=upload()).content == b"tensor" and legacy.get("/get").content != b"empty"
    )
    until(lambda: not legacy.get("/v1/batches", params={"run": "legacy", "state": "queued"}).json()["batches"])
    until(lambda: legacy.get("/get").content == b"empty")
