"""The stream of events: the current state, then changes; bounded, and ended with the client or the server."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from uuid import uuid4

import httpx
import pytest

from ref_server import background
from ref_server.http.routes import events as watchers
from shared.api import QueueView
from tests.harness.processes import until
from tests.ref_server.calls import MakeService, Rollout, Serve, admit, bearer
from tests.ref_server.sockets import head, rest

Event = tuple[str, dict[str, Any]]
ADMIN, MINE = (bearer(f"{name}-0123456789abcdef") for name in ("admin", "mine"))
TOKENS = """
admin admin-0123456789abcdef
train mine-0123456789abcdef name=mine run=mine
upload upload-0123456789abcdef name=upload
"""


@contextmanager
def watching(http: httpx.Client, **headers: str) -> Iterator[Iterator[Event]]:
    """The events of one stream."""
    with http.stream("GET", "/v1/events", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        yield read(answer)


def read(answer: httpx.Response) -> Iterator[Event]:
    name = ""
    for line in answer.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def first(events: Iterator[Event], name: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    return next(data for kind, data in events if kind == name and wanted(data))


def report(http: httpx.Client, run: str, step: int, **headers: str) -> None:
    body = {"records": [{"kind": "step", "step": step}], "lineage": "one"}
    http.post(f"/v1/runs/{run}/metrics", json=body, headers=headers).raise_for_status()


def test_the_current_state_and_changes(http: httpx.Client, rollout: Rollout) -> None:
    run = uuid4().hex
    report(http, run, 1)
    with watching(http) as events:
        assert next(events)[0] == "queue"
        assert first(events, "metrics", lambda data: data["run"] == run) == {
            "run": run,
            "lineage": "one",
            "kind": "step",
            "step": 1,
        }
        report(http, run, 2)
        assert first(events, "metrics", lambda data: data["run"] == run)["step"] == 2
        admit(http, rollout(run=run))
        view = first(events, "queue", lambda data: run in data["runs"])
        assert set(view) == set(http.get("/v1/queue").json())
        with watching(http) as others:  # a later stream begins with the current state, too
            assert first(others, "metrics", lambda data: data["run"] == run)["step"] == 2


def test_a_token_of_one_run_receives_events_of_that_run_only(
    make_service: MakeService, serve: Serve, tmp_path: Any
) -> None:
    (tmp_path / "tokens").write_text(TOKENS)
    with serve(make_service(token_file=tmp_path / "tokens")) as http:
        for run in ("yours", "mine"):
            report(http, run, 1, **ADMIN)
        with watching(http, **MINE) as mine, watching(http, **ADMIN) as all_runs:
            assert first(all_runs, "metrics", lambda data: data["run"] == "mine")["step"] == 1
            report(http, "yours", 2, **ADMIN)
            assert first(all_runs, "metrics", lambda data: data["run"] == "yours" and data["step"] == 2)
            report(http, "mine", 2, **MINE)
            received = []
            while ("metrics", 2) not in received:
                kind, data = next(mine)
                assert data.get("run", "mine") == "mine"
                assert set(data.get("runs", {})) <= {"mine"}
                received.append((kind, data.get("step")))
        assert http.get("/v1/events").status_code == 401
        assert http.get("/v1/events", headers=bearer("upload-0123456789abcdef")).status_code == 403


def test_watchers_are_bounded_and_give_their_places_back(
    make_service: MakeService, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "MOST", 4)
    with serve(make_service()) as http:
        with ExitStack() as stack:
            streams = [stack.enter_context(watching(http)) for _ in range(2)]
            assert [next(events)[0] for events in streams] == ["queue", "queue"]
            refused = http.get("/v1/events")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "busy")
            assert refused.headers["Retry-After"] == "1"

        def admitted() -> bool:
            with http.stream("GET", "/v1/events") as answer:
                return answer.status_code == 200

        until(admitted)
        with watching(http) as events:  # at once after the last one has gone
            assert next(events)[0] == "queue"


def test_a_comment_comes_in_a_silence(make_service: MakeService, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "COMMENT_SECONDS", 0.05)
    with serve(make_service()) as http, http.stream("GET", "/v1/events") as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith("event")) == "event: queue"
        assert next(line for line in lines if line.startswith(":")) == ":"


def test_a_bug_is_survived_and_makes_the_server_unready(
    make_service: MakeService, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(watchers, "EVERY_SECONDS", 0.01)
    service = make_service()
    with serve(service) as http, watching(http) as events:
        assert next(events)[0] == "queue"
        with monkeypatch.context() as broken:
            broken.setattr(service.queue, "curves", lambda: 1 / 0)
            until(lambda: "polling for events failed" in http.get("/readyz").text)
        report(http, "run", 1)
        assert first(events, "metrics", lambda data: data["run"] == "run")["step"] == 1
        until(lambda: http.get("/readyz").status_code == 200)


def test_the_end_of_the_server_ends_all_streams(make_service: MakeService, serve: Serve) -> None:
    service = make_service()
    with serve(service) as http, watching(http) as events:
        next(events)
        service.drain()
        assert all(name == "queue" for name, _ in events)  # the iterator ends
        refused = http.get("/v1/events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")


def test_unread_events_are_replaced_by_newer_ones() -> None:
    async def events() -> bytes:
        watcher = watchers.Watcher(None, lambda: None)
        for number in range(1000):
            watcher.tell("a", b"a%d " % number)
            watcher.tell("b", b"b%d " % number)
        return await anext(watcher.pieces())

    assert asyncio.run(events()) == b"a999 b999 "


def test_a_client_that_does_not_read_blocks_no_other_and_is_cut_off_at_the_end(
    make_service: MakeService, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "EVERY_SECONDS", 0.01)
    monkeypatch.setattr(watchers, "_END_SECONDS", 0.1)
    service = make_service()
    describe, numbers = service.describe_queue, count()

    def describe_at_length(*arguments: Any) -> QueueView:
        return describe(*arguments).model_copy(update={"since_start": {"x" * 2**20: next(numbers)}})

    monkeypatch.setattr(service, "describe_queue", describe_at_length)
    with serve(service) as http, socket.socket() as deaf, watching(http) as events:
        deaf.settimeout(60)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((http.base_url.host, http.base_url.port))
        deaf.sendall(head("GET", "/v1/events"))
        for _ in range(12):  # more than the buffers of a connection hold
            first(events, "queue", lambda data: True)
        service.drain()
        assert all(name == "queue" for name, _ in events)
        time.sleep(2 * watchers._END_SECONDS)
        assert rest(deaf).startswith(b"HTTP/1.1 200")
