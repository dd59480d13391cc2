"""Loops in the background of a real server: what fails is logged and tried again, and /readyz names it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
import structlog

from ref_server import background
from ref_server.background import BackgroundLoop
from ref_server.queue.queue import Queue
from ref_server.service.service import Service
from shared import wire
from shared.batch import Batch
from tests.harness.processes import until

Serve = Callable[[Service], AbstractContextManager[httpx.Client]]


class Odd:
    """A queue of which one method has a bug, as long as it is named."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.broken = ""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name == self.broken:
                raise TypeError("a bug")
            return getattr(self.queue, name)(*arguments)

        return call if name in ("tidy", "count_leasable", "wanted_reference") else getattr(self.queue, name)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_LONGEST_PAUSE", 0.01)


def test_a_loop_that_fails_for_days_goes_on() -> None:
    loop = BackgroundLoop("the work")
    with structlog.testing.capture_logs():
        for _ in range(1100):
            with loop.turn():
                raise TypeError("a bug")
    assert loop.pause == 60


def test_pauses_grow_and_several_failures_in_a_row_are_reported() -> None:
    loop, pauses, failures = BackgroundLoop("the work"), [], []
    with structlog.testing.capture_logs() as logs:
        for _ in range(8):
            with loop.turn():
                raise TypeError("a bug")
            pauses.append(loop.pause)
            failures.append(loop.failure)
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]
    assert failures[:2] == [None, None]
    assert failures[2] == "the work failed 3 times in a row, most recently with TypeError: a bug; see the log"
    assert [(entry["loop"], entry["again_in_seconds"]) for entry in logs[:2]] == [("the work", 2), ("the work", 4)]
    with loop.turn():
        pass
    assert (loop.pause, loop.failure) == (0, None)


def test_what_ends_a_loop_is_not_held_up() -> None:
    loop = BackgroundLoop("the work")
    with pytest.raises(KeyboardInterrupt), loop.turn():
        raise KeyboardInterrupt
    assert loop.pause == 0


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("tidy", ["queue cleanup"]),
        ("wanted_reference", ["polling for the wanted reference", "weights cleanup"]),
    ],
)
def test_a_loop_that_keeps_failing_makes_the_server_unready_until_it_works(
    make_service: Callable[..., Service], serve: Serve, method: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ref_server.service.service.TIDY_SECONDS", 0.01)
    monkeypatch.setattr("ref_server.service.reference.LOOK_SECONDS", 0.01)
    service = make_service(wrap=Odd)
    odd: Any = service.queue
    with serve(service) as http:
        odd.broken = method
        until(
            lambda: sorted(str(loop.failure).partition(" failed")[0] for loop in service.loops if loop.failure) == names
        )
        answer = http.get("/readyz")
        assert answer.status_code == 503
        assert f"{names[0]} failed" in answer.text or f"{names[-1]} failed" in answer.text
        odd.broken = ""
        until(lambda: http.get("/readyz").status_code == 200)


@pytest.mark.usefixtures("hasty")
def test_waiting_leases_get_their_batches_though_polling_fails(
    make_service: Callable[..., Service], serve: Serve, rollout: Callable[..., Batch]
) -> None:
    service = make_service(wrap=Odd)
    odd: Any = service.queue
    odd.broken = "count_leasable"
    with serve(service) as http, ThreadPoolExecutor(1) as threads:
        lease = threads.submit(http.post, "/v1/batches/lease", json={"consumer": "c", "wait_seconds": 50})
        until(lambda: "waiting leases failed" in http.get("/readyz").text)
        http.post("/v1/batches", content=wire.encode(rollout()), headers={"Content-Type": wire.CONTENT_TYPE})
        assert lease.result().status_code == 200
