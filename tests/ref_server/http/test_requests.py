"""What the log says of requests, and the id that goes with all of it."""

import json
import logging
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from ref_server.queue.errors import StorageBroken
from ref_server.queue.queue import Queue
from ref_server.service.service import Service
from shared import wire
from shared.batch import RolloutBatch
from tests.ports import free_port

Rollout = Callable[..., RolloutBatch]
Serve = Callable[[Service], AbstractContextManager[httpx.Client]]
Events = list[Any]
SECRET = "s3cret-of-the-client"
SAFETENSORS = {"Content-Type": wire.CONTENT_TYPE}

log = structlog.get_logger()


@pytest.fixture
def events() -> Iterator[Events]:
    """All that is logged, with what is bound to the context it is logged in."""
    configured = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG))
    with capture_logs([merge_contextvars]) as captured:
        yield captured
    structlog.configure(**configured)


def of_request(events: Events, answer: httpx.Response) -> Events:
    """The events of one request. Its own line comes after its answer."""
    deadline = time.monotonic() + 60
    id = answer.headers["X-Request-Id"]
    while time.monotonic() < deadline:
        found = [event for event in events.copy() if event.get("request_id") == id]
        if any(event["event"] in ("request", "audit") for event in found):
            return found
        time.sleep(0.01)
    raise AssertionError(f"nothing was logged of request {id}")


def test_a_request_is_one_line(http: httpx.Client, events: Events, rollout: Rollout) -> None:
    body = wire.encode(rollout(run="logged"))
    answer = http.post(
        f"/v1/batches?key={SECRET}",
        content=body,
        headers={**SAFETENSORS, "Authorization": f"Bearer {SECRET}", "X-Request-Id": "mine"},
    )
    assert answer.status_code == 201
    (event,) = of_request(events, answer)
    assert event.pop("ms") > 0
    assert event == {
        "event": "request",
        "log_level": "debug",
        "request_id": "mine",
        "method": "POST",
        "route": "/v1/batches",
        "status": 201,
        "bytes_in": len(body),
        "peer": "127.0.0.1",
        "id": answer.json()["id"],
    }
    assert SECRET not in repr(events)


@pytest.mark.parametrize(
    ("method", "path", "status", "level", "route", "code"),
    [
        ("GET", "/livez", 200, "debug", "/livez", None),
        ("GET", "/v1/batches/nowhere", 404, "debug", "/v1/batches/{id}", "not_found"),
        ("GET", f"/{SECRET}", 404, "debug", "unmatched", "not_found"),
        ("GET", f"/v1/batches?state={SECRET}", 422, "info", "/v1/batches", "invalid_request"),
        ("PUT", "/livez", 405, "info", "/livez", "method_not_allowed"),
        ("BREW", "/livez", 405, "info", "/livez", "method_not_allowed"),
        ("x" * 9000, "/livez", 405, "info", "/livez", "method_not_allowed"),
        ("POST", "/v1/batches/lease", 415, "info", "/v1/batches/lease", "unsupported_media_type"),
    ],
)
def test_levels_and_routes(
    http: httpx.Client, events: Events, method: str, path: str, status: int, level: str, route: str, code: str | None
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    (event,) = of_request(events, answer)
    assert (event["log_level"], event["route"], event.get("code")) == (level, route, code)
    assert event["method"] == (method if method in ("GET", "PUT", "POST") else "other")
    assert SECRET not in repr(event)


class Talking:
    """A queue that logs, and then fails: it is called in a thread of the pool."""

    def __init__(self, queue: Queue, error: Exception) -> None:
        self._queue = queue
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def put(self, *_: Any) -> None:
        log.info("said in a thread")
        raise self._error

    def get(self, *_: Any) -> None:
        log.info("said in another")
        raise self._error


@pytest.mark.parametrize(
    ("error", "status", "code"), [(StorageBroken("gone"), 503, "storage_broken"), (KeyError("bug"), 500, "internal")]
)
def test_all_that_is_logged_in_a_request_carries_its_id(
    make_service: Callable[..., Service],
    serve: Serve,
    events: Events,
    rollout: Rollout,
    error: Exception,
    status: int,
    code: str,
) -> None:
    with serve(make_service(wrap=lambda queue: Talking(queue, error))) as http:
        answers = [
            http.post("/v1/batches", content=wire.encode(rollout()), headers=SAFETENSORS),
            http.get("/v1/batches/some"),
        ]
        assert [answer.status_code for answer in answers] == [status, status]
        for answer, said in zip(answers, ["said in a thread", "said in another"], strict=True):
            spoken, request = of_request(events, answer)
            assert spoken["event"] == said
            assert (request["log_level"], request["status"], request["code"]) == ("error", status, code)


def test_a_server_that_drains_logs_no_errors(
    make_service: Callable[..., Service], serve: Serve, events: Events, rollout: Rollout
) -> None:
    service = make_service()
    with serve(service) as http:
        service.drain()
        answers = [http.post("/v1/batches", content=wire.encode(rollout()), headers=SAFETENSORS), http.get("/readyz")]
        for answer in answers:
            (event,) = of_request(events, answer)
            assert (event["status"], event["code"], event["log_level"]) == (503, "not_ready", "info")


def test_callers_without_a_right_are_logged_and_counted(
    make_service: Callable[..., Service], serve: Serve, events: Events
) -> None:
    token = "a-token-of-an-admin"
    with serve(make_service(token=token)) as http:
        refused = http.get("/v1/batches/some")
        (event,) = of_request(events, refused)
        assert (event["status"], event["route"], event["log_level"]) == (401, "/v1/batches/{id}", "info")
        assert "role" not in event
        let_in = http.get("/metrics", headers={"Authorization": f"Bearer {token}"})
        (event,) = of_request(events, let_in)
        assert (event["status"], event["role"]) == (200, "admin")
    assert 'tandem_http_errors_total{code="unauthorized",status="401"} 1.0' in let_in.text
    assert token not in repr(events)


def test_a_client_that_goes_away(http: httpx.Client, events: Events) -> None:
    head = (
        "POST /v1/batches HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: gone\r\n"
        f"Content-Type: {wire.CONTENT_TYPE}\r\nContent-Length: 1000\r\n\r\n"
    )
    with socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=60) as connection:
        connection.sendall(head.encode() + b"half")
    (event,) = of_request(events, httpx.Response(200, headers={"X-Request-Id": "gone"}))
    assert (event["status"], event["bytes_in"], event["route"]) == (499, 4, "/v1/batches")


def test_ids_do_not_leak_into_other_requests(http: httpx.Client, events: Events) -> None:
    """One connection after the other, and one."""
    answers = [http.get("/livez", headers={"X-Request-Id": f"request-{number}"}) for number in range(3)]
    for answer in answers:
        assert len(of_request(events, answer)) == 1
    assert len({answer.headers["X-Request-Id"] for answer in answers}) == 3


def test_an_id_that_cannot_be_printed_is_replaced(http: httpx.Client) -> None:
    for given in ("a\tb", "x" * 101, "", "\xe9"):
        answer = http.get("/livez", headers=[(b"X-Request-Id", given.encode("latin-1"))])
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["X-Request-Id"])
    assert len(http.get("/livez").headers.get_list("X-Request-Id")) == 1


@pytest.mark.slow
def test_the_log_of_a_process_is_json(tmp_path: Path) -> None:
    """Also what uvicorn says, and the traceback of a bug."""
    port = free_port()
    code = (
        "import sys; from ref_server.queue import catalog; from ref_server.__main__ import main\n"
        "catalog.get = lambda *_: 1 / 0\n"
        f"sys.argv[1:] = 'serve --no-model --port {port} --log-format json --log-level debug'.split()\n"
        f"sys.argv += ['--data-dir', {str(tmp_path)!r}]\n"
        "main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            deadline = time.monotonic() + 60
            while not reached(http):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert http.get("/v1/batches/some", headers={"X-Request-Id": "bad luck"}).status_code == 500
        process.send_signal(signal.SIGTERM)
        events = [json.loads(line) for line in process.communicate(timeout=300)[1].splitlines()]
    finally:
        process.kill()
        process.wait()
    assert all({"timestamp", "level", "event"} <= set(event) for event in events)
    unlucky = [event for event in events if event.get("request_id") == "bad luck"]
    assert {event.get("logger") for event in unlucky} == {None, "uvicorn.error"}
    assert any("ZeroDivisionError" in event.get("exception", "") for event in unlucky)
    assert [event["status"] for event in unlucky if event["event"] == "request"] == [500]


def reached(http: httpx.Client) -> bool:
    try:
        return http.get("/livez").status_code == 200
    except httpx.TransportError:
        return False


# --- who did what


@pytest.fixture(scope="module")
def owned(
    make_service: Callable[..., Service], serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A server whose tokens have names."""
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text(f"admin {SECRET} name=ann\ntrain {SECRET}-2 name=gpu-2\n")
    with serve(make_service(token_file=file)) as client:
        yield client


def audited(events: Events, answer: httpx.Response) -> dict[str, Any]:
    [line] = [event for event in of_request(events, answer) if event["event"] == "audit"]
    assert line["log_level"] == "info"
    assert SECRET not in str(line)
    names = (
        "name",
        "role",
        "method",
        "route",
        "id",
        "state",
        "run",
        "dropped",
        "snapshot",
        "version",
        "status",
        "code",
    )
    return {name: line[name] for name in names if name in line}


def test_what_an_operator_changes_is_a_line_with_the_name(
    owned: httpx.Client, events: Events, rollout: Rollout
) -> None:
    batch, admin = rollout(run="mine"), {"Authorization": f"Bearer {SECRET}"}
    upload = owned.post("/v1/batches", content=wire.encode(batch), headers=SAFETENSORS | admin)
    [line] = [event for event in of_request(events, upload) if event["event"] == "request"]
    assert (line["log_level"], line["name"], line["id"]) == ("debug", "ann", batch.id)

    owned.post("/v1/batches/lease", json={"consumer": "c", "run": "mine"}, headers=admin)  # once it is scored
    dropped = owned.delete(f"/v1/batches/{batch.id}", headers=admin)
    assert audited(events, dropped) == {
        "name": "ann", "role": "admin", "method": "DELETE", "route": "/v1/batches/{id}", "id": batch.id, "status": 204,
    }  # fmt: skip
    requeued = owned.post(f"/v1/batches/{batch.id}/requeue", headers=admin)
    assert audited(events, requeued)["status"] == 409
    replaced = owned.put("/v1/reference", json={"snapshot": "s", "version": 3}, headers=admin)
    assert {"snapshot": "s", "version": 3}.items() <= audited(events, replaced).items()
    purged = owned.post("/v1/batches/purge", json={"state": "expired", "run": "mine"}, headers=admin)
    told = {"name": "ann", "state": "expired", "run": "mine", "dropped": 0}
    assert told.items() <= audited(events, purged).items()
    finished = owned.post("/v1/runs/mine/finish", json={}, headers={"Authorization": f"Bearer {SECRET}-2"})
    assert {"name": "gpu-2", "role": "train", "run": "mine"}.items() <= audited(events, finished).items()


def test_an_attempt_without_the_right_is_audited_too(owned: httpx.Client, events: Events) -> None:
    refused = owned.delete("/v1/batches/1", headers={"Authorization": f"Bearer {SECRET}-2"})
    assert {"code": "forbidden", "name": "gpu-2", "role": "train"}.items() <= audited(events, refused).items()
    assert audited(events, owned.delete("/v1/batches/1"))["status"] == 401


def test_a_stream_is_no_slow_request(http: httpx.Client, events: Events) -> None:
    with http.stream("GET", "/v1/events") as answer:
        lines = answer.iter_lines()
        next(lines)
        http.get("/livez")
    (event,) = of_request(events, answer)
    assert (event["status"], event["route"]) == (200, "/v1/events")
    assert event["ms"] / 1000 <= event["open_seconds"] + 0.1  # rounded
