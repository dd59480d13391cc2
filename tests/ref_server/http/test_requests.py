"""The log lines of requests, their ids, and audit lines."""

import json
import logging
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from ref_server.queue.errors import StorageBroken
from ref_server.queue.queue import Queue
from shared import wire
from tests.harness.ports import free_port
from tests.ref_server.calls import SAFETENSORS, MakeService, Rollout, Serve, bearer, upload
from tests.ref_server.sockets import connected, head

Events = list[Any]
SECRET = "s3cret-of-the-client"
log = structlog.get_logger()


@pytest.fixture
def events() -> Iterator[Events]:
    """All that is logged, with the context of each line."""
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
        lines = [event for event in events.copy() if event.get("request_id") == id]
        if any(event["event"] in ("request", "audit") for event in lines):
            return lines
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
        ("GET", "/v1/batches/nowhere", 404, "debug", "/v1/batches/{id}", "not_found"),
        ("GET", f"/{SECRET}", 404, "debug", "unmatched", "not_found"),
        ("GET", f"/v1/batches?state={SECRET}", 422, "info", "/v1/batches", "invalid_request"),
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


class LoggingQueue:
    """A queue that logs, and then fails. It is called in a thread."""

    def __init__(self, queue: Queue, error: Exception) -> None:
        self._queue = queue
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def put(self, *_: Any) -> None:
        log.info("from a thread")
        raise self._error


@pytest.mark.parametrize(
    ("error", "status", "code"), [(StorageBroken("gone"), 503, "storage_broken"), (KeyError("bug"), 500, "internal")]
)
def test_lines_from_threads_carry_the_request_s_id(
    make_service: MakeService, serve: Serve, events: Events, rollout: Rollout, error: Exception, status: int, code: str
) -> None:
    with serve(make_service(wrap=lambda queue: LoggingQueue(queue, error))) as http:
        answer = upload(http, rollout())
        assert answer.status_code == status
        line, request = of_request(events, answer)
        assert line["event"] == "from a thread"
        assert (request["log_level"], request["status"], request["code"]) == ("error", status, code)


def test_a_server_that_drains_logs_no_errors(
    make_service: MakeService, serve: Serve, events: Events, rollout: Rollout
) -> None:
    service = make_service()
    with serve(service) as http:
        service.drain()
        for answer in (upload(http, rollout()), http.get("/readyz")):
            (event,) = of_request(events, answer)
            assert (event["status"], event["code"], event["log_level"]) == (503, "not_ready", "info")


def test_unauthorized_requests_are_logged_and_counted(make_service: MakeService, serve: Serve, events: Events) -> None:
    token = "a-token-of-an-admin"
    with serve(make_service(token=token)) as http:
        refused = http.get("/v1/batches/some")
        (event,) = of_request(events, refused)
        assert (event["status"], event["route"], event["log_level"]) == (401, "/v1/batches/{id}", "info")
        assert "role" not in event
        admitted = http.get("/metrics", headers=bearer(token))
        (event,) = of_request(events, admitted)
        assert (event["status"], event["role"]) == (200, "admin")
    assert 'tandem_http_errors_total{code="unauthorized",status="401"} 1.0' in admitted.text
    assert token not in repr(events)


def test_a_client_that_goes_away(http: httpx.Client, events: Events) -> None:
    lines = ("X-Request-Id: gone", f"Content-Type: {wire.CONTENT_TYPE}", "Content-Length: 1000")
    with connected(http) as connection:
        connection.sendall(head("POST", "/v1/batches", *lines) + b"half")
    (event,) = of_request(events, httpx.Response(200, headers={"X-Request-Id": "gone"}))
    assert (event["status"], event["bytes_in"], event["route"]) == (499, 4, "/v1/batches")


def test_an_id_that_cannot_be_printed_is_replaced(http: httpx.Client) -> None:
    for given in ("a\tb", "x" * 101, "", "\xe9"):
        answer = http.get("/livez", headers=[(b"X-Request-Id", given.encode("latin-1"))])
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["X-Request-Id"])
    assert len(http.get("/livez").headers.get_list("X-Request-Id")) == 1


@pytest.mark.slow
def test_the_log_of_a_process_is_json(tmp_path: Path) -> None:
    """Including uvicorn's lines and the traceback of a bug."""
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
        transport = httpx.HTTPTransport(retries=12)  # of connections, with growing pauses
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, transport=transport) as http:
            assert http.get("/livez").status_code == 200
            assert http.get("/v1/batches/some", headers={"X-Request-Id": "bad luck"}).status_code == 500
        process.send_signal(signal.SIGTERM)
        events = [json.loads(line) for line in process.communicate(timeout=300)[1].splitlines()]
    finally:
        process.kill()
        process.wait()
    assert all({"timestamp", "level", "event"} <= set(event) for event in events)
    lines = [event for event in events if event.get("request_id") == "bad luck"]
    assert {event.get("logger") for event in lines} == {None, "uvicorn.error"}
    assert any("ZeroDivisionError" in event.get("exception", "") for event in lines)
    assert [event["status"] for event in lines if event["event"] == "request"] == [500]


# Audit lines


@pytest.fixture(scope="module")
def named(make_service: MakeService, serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server whose tokens have names."""
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text(f"admin {SECRET} name=ann\ntrain {SECRET}-2 name=gpu-2\n")
    with serve(make_service(token_file=file)) as client:
        yield client


def audited(events: Events, answer: httpx.Response) -> dict[str, Any]:
    [line] = [event for event in of_request(events, answer) if event["event"] == "audit"]
    assert line["log_level"] == "info"
    assert SECRET not in str(line)
    return line


def test_changes_by_operators_are_audited(named: httpx.Client, events: Events, rollout: Rollout) -> None:
    batch, admin, trainer = rollout(run="mine"), bearer(SECRET), bearer(f"{SECRET}-2")
    sent = upload(named, batch, **admin)
    [line] = [event for event in of_request(events, sent) if event["event"] == "request"]
    assert (line["log_level"], line["name"], line["id"]) == ("debug", "ann", batch.id)

    named.post("/v1/batches/lease", json={"consumer": "c", "run": "mine"}, headers=admin)  # once it is scored
    path = f"/v1/batches/{batch.id}"
    ann, gpu = {"name": "ann", "role": "admin"}, {"name": "gpu-2", "role": "train"}
    finish = "/v1/runs/mine/finish"
    for answer, expected in (
        (named.delete(path, headers=admin), ann | {"route": "/v1/batches/{id}", "id": batch.id, "status": 204}),
        (named.post(f"{path}/requeue", headers=admin), ann | {"status": 409}),
        (
            named.put("/v1/reference", json={"snapshot": "s", "version": 3}, headers=admin),
            ann | {"snapshot": "s", "version": 3},
        ),
        (
            named.post("/v1/batches/purge", json={"state": "expired", "run": "mine"}, headers=admin),
            ann | {"state": "expired", "run": "mine", "dropped": 0},
        ),
        (named.post(finish, json={}, headers=trainer), gpu | {"run": "mine"}),
        (named.delete(path, headers=trainer), gpu | {"code": "forbidden"}),
        (named.delete(path), {"status": 401}),
    ):
        assert expected.items() <= audited(events, answer).items()


def test_a_stream_is_no_slow_request(http: httpx.Client, events: Events) -> None:
    with http.stream("GET", "/v1/events") as answer:
        lines = answer.iter_lines()
        next(lines)
        http.get("/livez")
    (event,) = of_request(events, answer)
    assert (event["status"], event["route"]) == (200, "/v1/events")
    assert event["ms"] / 1000 <= event["open_seconds"] + 0.1  # rounded
