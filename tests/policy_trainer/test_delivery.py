"""Uploading while sampling: in order, not too far ahead, and never silently stuck."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.delivery import Delivery
from policy_trainer.outbox import Outbox
from shared import wire
from shared.batch import ScoredBatch


class Server:
    """Admits while it is open."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.open = threading.Event()
        self.failure: Exception | None = None
        self.admitted = threading.Condition()

    def upload(self, body: bytes) -> None:
        assert self.open.wait(10)
        if self.failure:
            raise self.failure
        with self.admitted:
            self.bodies.append(body)
            self.admitted.notify_all()

    def wait_for(self, count: int) -> None:
        with self.admitted:
            assert self.admitted.wait_for(lambda: len(self.bodies) >= count, timeout=10)


def outbox(directory: Path) -> Outbox:
    return Outbox(directory, worker=0, workers=1, start=0)


def deliver(server: Any, box: Outbox, ahead: int = 2) -> Delivery:
    return Delivery(server, box, ahead=ahead)


def test_what_an_earlier_life_left_goes_first(tmp_path: Path, make_scored: Callable[..., ScoredBatch]) -> None:
    left = [wire.encode(make_scored([5, 6], [[7]], [1.0]).rollout) for _ in range(2)]
    earlier = outbox(tmp_path)
    for index, body in enumerate(left):
        earlier.add(index, body)
    server = Server()
    delivery = deliver(server, outbox(tmp_path))
    delivery.send(2, b"2")
    server.open.set()
    delivery.send(3, b"3")
    server.wait_for(4)
    assert server.bodies == [*left, b"2", b"3"]


def test_what_a_power_cut_spoilt_is_dropped(tmp_path: Path) -> None:
    earlier = outbox(tmp_path)
    for index, body in enumerate((b"", b"half a batch")):
        earlier.add(index, body)
    server = Server()
    server.open.set()
    box = outbox(tmp_path)
    deliver(server, box).send(box.draw(), b"new")
    server.wait_for(1)
    assert server.bodies == [b"new"]


def test_sampling_waits_when_too_many_wait(tmp_path: Path) -> None:
    """One is on its way and two wait: the fourth has to wait itself, and that time is counted."""
    server = Server()
    delivery = deliver(server, outbox(tmp_path))
    for index in range(3):
        delivery.send(index, b"")
    before = delivery.blocked_seconds
    sender = threading.Thread(target=delivery.send, args=(3, b"last"))
    sender.start()
    sender.join(timeout=0.2)
    assert sender.is_alive()
    assert len(outbox(tmp_path).undelivered()) == 4, "it is kept before it waits"
    server.open.set()
    sender.join(timeout=10)
    assert delivery.blocked_seconds - before > 0.15
    server.wait_for(4)
    assert server.bodies[-1] == b"last"


def test_what_stops_an_upload_for_good_is_raised_in_the_thread_that_samples(tmp_path: Path) -> None:
    class Refused(Exception):
        pass

    server = Server()
    server.failure = Refused()
    delivery = deliver(server, outbox(tmp_path), ahead=1)
    server.open.set()
    with pytest.raises(Refused):
        for index in range(5):
            delivery.send(index, b"")
    assert outbox(tmp_path).undelivered(), "nothing that was refused is thrown away"
