"""The watched state of the queue, and the reason for waiting read from it."""

import re
import threading
from typing import Any, cast

import pytest

from policy_trainer.queue_client.queue_watch import QueueWatch
from shared.api import BatchPage, BatchSummary, ListOrder, QueueView, State
from shared.client import RefServerClient
from tests.policy_trainer.queues import queue_of


class Client:
    """Answers each glance with the next of its answers."""

    def __init__(self, *answers: QueueView | None) -> None:
        self.answers = list(answers)
        self.pages = 0

    def page(self, state: State, run: str, *, limit: int, order: ListOrder) -> BatchPage:
        assert (state, run, limit, order) == (State.EXPIRED, "ours", 1, ListOrder.NEWEST)
        self.pages += 1
        numbers = dict.fromkeys(BatchSummary.model_fields, 0) | {"epoch": 0, "policy_version": 7}
        texts = {"id": "1", "run": run, "lineage": "first", "reason": "abandoned", "state": state, "consumer": None}
        return BatchPage(batches=[BatchSummary.model_validate(numbers | texts)], next_cursor=None)

    def glance(self, run: str) -> QueueView | None:
        assert run == "ours"
        return self.answers.pop(0)


def watch(*answers: QueueView | None) -> QueueWatch:
    return QueueWatch(cast(RefServerClient, Client(*answers)), "ours")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("policy_trainer.queue_client.queue_watch.time.monotonic", lambda: now[0])
    return now


def test_it_asks_once_a_second(clock: list[float]) -> None:
    watched = watch(queue_of(ready=2), queue_of(ready=5))
    assert watched.depth == dict.fromkeys(("queued", "scoring", "ready", "expired", "dead"))
    for now, ready in ((100.0, 2), (100.9, 2), (101.0, 5)):
        clock[0] = now
        watched.look()
        assert watched.depth["ready"] == ready
    assert watched.depth == {"queued": 0, "scoring": 0, "ready": 5, "expired": 0, "dead": 0}


def test_what_was_seen_holds_while_the_server_does_not_answer(clock: list[float]) -> None:
    watched = watch(queue_of(leased=8, max_in_flight=8), None)
    for now in (100.0, 102.0):
        clock[0] = now
        watched.look()
        assert watched.leases_full and watched.depth["ready"] == 2


@pytest.mark.parametrize(
    ("queue", "reason"),
    [
        ({}, "the worker"),
        ({"queued": 2, "scoring": 1}, "the reference server scores 3 batches"),
        ({"queued": 2, "leased": 8, "max_in_flight": 8}, "the reference server leases no more batches .*"),
        ({"dead": 1, "expired": 4}, "the worker; batches dead since the start: 1; batches expired since the start: 4"),
    ],
)
def test_whom_a_trainer_waits_for(queue: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((100.0, 100.0, 102.0, 102.0))
    monkeypatch.setattr("policy_trainer.queue_client.queue_watch.time.monotonic", lambda: next(clock))
    watched = watch(queue_of(), queue_of(**queue))
    assert watched.wait_reason("the worker") == "the worker", "nothing is known yet"
    watched.look()
    watched.look()
    assert re.fullmatch(reason, watched.wait_reason("the worker"))


def test_what_an_earlier_run_of_the_name_left_is_no_reason_to_wait(clock: list[float]) -> None:
    watched = watch(queue_of(dead=1, expired=8), queue_of(dead=1, expired=9))
    watched.look()
    assert watched.wait_reason("the worker") == "the worker"
    clock[0] += 2
    watched.look()
    assert watched.wait_reason("the worker") == "the worker; batches expired since the start: 1"


def test_samplers_of_an_epoch_that_has_ended_are_named(clock: list[float]) -> None:
    """Not of one's own worker: its outbox may have held some when the run was killed."""
    for external, calls in ((True, 2), (False, 0)):
        client = Client(queue_of(), queue_of(expired=3), queue_of(expired=3), queue_of(expired=4))
        watched = QueueWatch(cast(RefServerClient, client), "ours", external=external)
        reasons = []
        for _ in range(4):
            clock[0] += 2
            watched.look()
            reasons.append(watched.wait_reason("no worker"))
        abandoned = "batches arrive but are abandoned: the newest has epoch 0, policy_version 7, lineage 'first'"
        start = abandoned if external else "no worker"
        assert reasons[0] == "no worker" and reasons[1] == reasons[2]
        assert [reason.startswith(start) for reason in reasons[1:]] == [True] * 3
        assert reasons[3].endswith("; batches expired since the start: 4")
        assert client.pages == calls, "one for each new number"


def test_a_server_that_hangs_holds_up_one_look_for_a_moment(open_site: Any) -> None:
    over = threading.Event()
    answers: list[bool] = []
    site = open_site(lambda _: answers.append(over.wait(30)))
    with RefServerClient(site.url, patience=None) as client:
        watched = QueueWatch(client, "ours")
        for _ in range(5):
            watched.look()
        assert not answers, "it went on before the server answered"
        assert len(site.requests) == 1
    over.set()
