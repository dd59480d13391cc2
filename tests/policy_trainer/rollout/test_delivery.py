"""Uploads during sampling: in order, not too far ahead, and never stuck without an error."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.rollout.delivery import Delivery
from policy_trainer.rollout.outbox import Outbox, count_refused, hold
from shared import wire
from shared.api import State, Uploaded
from shared.batch import Batch
from shared.client import RefServerError
from shared.errors import UserError
from tests.harness.processes import until
from tests.policy_trainer.rollout.fakes import Server


def outbox(directory: Path) -> Outbox:
    return Outbox(directory, worker=0, workers=1, start=0)


def deliver(server: Any, box: Outbox, ahead: int = 2) -> Delivery:
    return Delivery(server, box, ahead=ahead)


def test_batches_of_an_earlier_process_go_first(tmp_path: Path, make_scored: Callable[..., Batch]) -> None:
    left = [wire.encode(make_scored([5, 6], [[7]], [1.0]).without_scores()) for _ in range(2)]
    earlier = outbox(tmp_path)
    for index, body in enumerate([*left, b"", b"half of a batch"]):  # the last two after a power cut
        earlier.add(index, body)
    server = Server()
    delivery = deliver(server, outbox(tmp_path))
    delivery.send(4, b"4")
    server.open.set()
    delivery.send(5, b"5")
    server.wait_for(4)
    assert server.bodies[:2] == left
    assert sorted(server.bodies[2:]) == [b"4", b"5"]


def test_sampling_waits_when_too_many_wait(tmp_path: Path) -> None:
    """One is being uploaded and two wait: sending a fourth waits, and that time is counted."""
    server = Server()
    delivery = deliver(server, outbox(tmp_path))
    delivery.send(0, b"")
    assert server.called.wait(60)  # those that wait meanwhile would go with it
    for index in (1, 2):
        delivery.send(index, b"")
    before = delivery.blocked_seconds
    sender = threading.Thread(target=delivery.send, args=(3, b"last"))
    sender.start()
    sender.join(timeout=0.2)
    assert sender.is_alive()
    assert len(outbox(tmp_path).undelivered()) == 4, "it is kept before it waits"
    server.open.set()
    sender.join(timeout=60)
    assert delivery.blocked_seconds - before > 0.15
    server.wait_for(4)
    assert server.bodies[-1] == b"last"


@pytest.mark.parametrize("failure", [KeyError("gone"), RefServerError(422, "gone", code="invalid_batch")])
def test_what_cannot_succeed_raises_in_the_sampling_thread(tmp_path: Path, failure: Exception) -> None:
    """One upload that fails otherwise than by its batch, or a server that refuses every batch."""
    server = Server()
    server.failure = failure
    delivery = deliver(server, outbox(tmp_path), ahead=1)
    server.open.set()
    with pytest.raises(type(failure), match="gone"):
        for index in range(30):
            delivery.send(index, b"")
    assert outbox(tmp_path).undelivered(), "nothing is lost"


def test_a_refused_batch_is_set_aside(tmp_path: Path) -> None:
    class Picky(Server):
        def upload(self, body: bytes) -> Uploaded:
            if body == b"too large":
                raise RefServerError(413, "too large", code="too_large", field="completion_ids")
            return super().upload(body)

    server = Picky()
    server.open.set()
    directory = tmp_path / "0-of-1"
    box = outbox(directory)
    delivery = deliver(server, box)
    for body in (b"too large", b"good"):
        delivery.send(box.draw(), body)
    server.wait_for(1)
    until(lambda: not list(directory.glob("*.safetensors")))
    assert server.bodies == [b"good"]
    assert [path.name for path in directory.glob("*.refused")] == ["000000000000.refused"]
    assert count_refused(tmp_path) == 1, "the trainer counts it"
    assert outbox(directory).next_index == 2, "a restart does not send it again"


def test_large_batches_are_uploaded_at_once_and_recorded_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is answered last: no later one may move the cursor past it."""
    monkeypatch.setattr("policy_trainer.rollout.delivery._REQUEST_BYTES", 5)

    class Slow(Server):
        def __init__(self) -> None:
            super().__init__()
            self.all_three = threading.Barrier(3)
            self.others = threading.Semaphore(0)

        def upload(self, body: bytes) -> Uploaded:
            if body == b"single":
                return super().upload(body)
            self.all_three.wait(60)
            if body == b"first":
                assert self.others.acquire(timeout=60) and self.others.acquire(timeout=60)
                assert cursor() <= 1, "nothing is recorded before the first"
            uploaded = super().upload(body)
            self.others.release()
            return uploaded

    def cursor() -> int:
        return json.loads((tmp_path / "cursor.json").read_text())["next_index"]

    server, box = Slow(), outbox(tmp_path)
    delivery = deliver(server, box, ahead=4)
    delivery.send(box.draw(), b"single")
    assert server.called.wait(60)  # it is on its way by itself, and the others wait for it
    for body in (b"first", b"second", b"third"):
        delivery.send(box.draw(), body)
    server.open.set()
    server.wait_for(4)
    until(lambda: cursor() == 4)
    assert server.bodies[-1] == b"first"


def test_small_batches_share_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait together, up to a number of bytes."""
    monkeypatch.setattr("policy_trainer.rollout.delivery._REQUEST_BYTES", 15)
    requests: list[list[bytes]] = []

    class Noting(Server):
        def upload_several(self, bodies: Sequence[bytes]) -> list[Uploaded | RefServerError]:
            requests.append([*bodies])
            return super().upload_several(bodies)

    server, box = Noting(), outbox(tmp_path)
    delivery = deliver(server, box, ahead=9)
    delivery.send(box.draw(), b"single")
    assert server.called.wait(60)
    for body in (b"12", b"345", b"6", b"too large", b"7", b"8"):
        delivery.send(box.draw(), body)
    server.open.set()
    server.wait_for(7)
    assert sorted(requests) == sorted([[b"single"], [b"12", b"345"], [b"6"], [b"too large"], [b"7", b"8"]])
    until(lambda: not box.waiting)


def test_a_closed_delivery_writes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another training may use the outbox by then. Meanwhile no other worker can."""
    monkeypatch.setattr("policy_trainer.rollout.outbox._LOCK_SECONDS", 0.2)
    lock = hold(tmp_path, worker=0, workers=1)
    with pytest.raises(UserError, match="worker 0 of 1 already runs"):
        hold(tmp_path, worker=0, workers=1)
    lock.close()
    hold(tmp_path, worker=0, workers=1).close()
    server, box = Server(), outbox(tmp_path)
    delivery = deliver(server, box)
    delivery.send(box.draw(), b"late")
    assert server.called.wait(60)
    delivery.close()
    server.open.set()
    server.wait_for(1)
    assert [body for _, body in outbox(tmp_path).undelivered()] == [b"late"]


def test_a_worker_whose_batches_all_expire_stops(tmp_path: Path) -> None:
    server, box = Server(), outbox(tmp_path)
    server.open.set()
    delivery = deliver(server, box)
    for state, count in ((State.EXPIRED, 9), (State.QUEUED, 1), (State.EXPIRED, 9)):
        server.state = state
        for _ in range(count):
            delivery.send(box.draw(), b"")
        until(lambda: not box.waiting)
        delivery.check()
    delivery.send(box.draw(), b"")
    until(lambda: not box.waiting)
    with pytest.raises(UserError, match="run: the server expired the last 10 batches"):
        delivery.check()
