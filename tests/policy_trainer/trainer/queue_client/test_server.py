"""The connection to the server, the state of its queue, and why a trainer waits."""

import re
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from policy_trainer.config import RolloutConfig
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.server_address import write_address
from policy_trainer.trainer.queue_client.server import (
    QueueWatch,
    connect,
    leases_are_full,
    store_fills_up,
    token_of,
)
from ref_server.queue.limits import RunShare
from shared.api import BatchPage, BatchSummary, ListOrder, QueueView, State
from shared.client import RefServerClient
from shared.settings import from_values
from tests.policy_trainer.queues import queue_of


def test_the_token_of_a_run_is_the_configured_one_else_that_of_its_own_server(tmp_path: Path) -> None:
    write_address(RunDirectory(tmp_path), 8400, "of-the-server")
    config = from_values(RolloutConfig, model="m", run_dir=tmp_path)
    assert token_of(config) == "of-the-server"
    (tmp_path / "token").write_text("mine")
    assert token_of(config.model_copy(update={"token_file": tmp_path / "token"})) == "mine"
    assert token_of(config.model_copy(update={"server": "http://elsewhere:8400"})) is None


@pytest.mark.parametrize(
    ("numbers", "full"),
    [
        ({"leased": 7, "max_in_flight_per_run": 8}, False),
        ({"leased": 8, "max_in_flight_per_run": 8}, True),
        ({"leased": 1, "leased_by_others": 8, "max_in_flight_per_run": 8}, False),
        ({"leased": 1, "leased_by_others": 3, "max_in_flight": 8}, False),
        ({"leased": 1, "leased_by_others": 5, "max_in_flight": 8}, True),
        ({"leased": 3, "max_in_flight": 8}, False),
        ({"leased": 4, "max_in_flight": 8}, True),
    ],
)
def test_whether_leases_are_full(numbers: dict[str, int], full: bool) -> None:
    assert leases_are_full(queue_of(**numbers), "ours") is full


@pytest.mark.parametrize("runs", [1, 2, 3, 4, 8, 50])
def test_leases_are_full_where_the_server_refuses_another_to_each_of_equal_runs_of_one_token(runs: int) -> None:
    most = 4096

    def full(each: int) -> bool:
        others = (runs - 1) * each
        return leases_are_full(
            queue_of(leased=each, leased_by_others=others, max_in_flight=most, max_in_flight_per_run=most), "ours"
        )

    each = 0
    while RunShare("ours", each, runs * each, runs * each, "batches", "are leased").room(most, most):
        assert not full(each)
        each += 1
    assert full(each)


@pytest.mark.parametrize(
    ("numbers", "fills_up"),
    [
        ({"ready": 0, "leased": 3, "max_stored_bytes": 61}, False),  # 30 of its bytes, and 1 of them is leased in all
        ({"ready": 0, "leased": 3, "max_stored_bytes": 60}, True),
        ({"ready": 1, "leased": 2, "max_stored_bytes": 60}, True),
        ({"ready": 0, "dead": 9, "expired": 9, "max_stored_bytes": 60}, False),
    ],
)
def test_whether_a_run_fills_its_share_of_the_store(numbers: dict[str, int], fills_up: bool) -> None:
    assert store_fills_up(queue_of(**numbers), "ours") is fills_up


@pytest.mark.parametrize(("server", "port"), [("http://127.0.0.1:1", " --port 1"), ("http://localhost:8400", "")])
def test_without_an_answer_the_command_that_starts_a_server_is_named(
    server: str, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Enough(Exception):
        pass

    def on_wait(reason: str, seconds: float) -> None:
        raise Enough(reason)

    def refuse(*_: object, **__: object) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx.Client, "stream", refuse)
    message = (
        f"the reference server at {server} does not answer (refused); "
        f"start one with: `ref-server serve --model m{port}`, or leave --server out"
    )
    client = connect(from_values(RolloutConfig, model="m", server=server), server, on_wait)
    with client, pytest.raises(Enough, match=f"^{re.escape(message)}$"):
        client.model()


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
    monkeypatch.setattr("policy_trainer.trainer.queue_client.server.time.monotonic", lambda: now[0])
    return now


def test_it_asks_once_a_second_and_keeps_the_last_answer(clock: list[float]) -> None:
    watched = watch(queue_of(ready=2), queue_of(ready=5, leased=8, max_in_flight=8), None)
    assert watched.depth == dict.fromkeys(("queued", "scoring", "ready", "expired", "dead"))
    for now, ready in ((100.0, 2), (100.9, 2), (101.0, 5), (103.0, 5)):
        clock[0] = now
        watched.look()
        assert watched.depth["ready"] == ready and watched.leases_full == (ready == 5)
    assert watched.depth == {"queued": 0, "scoring": 0, "ready": 5, "expired": 0, "dead": 0}


@pytest.mark.parametrize(
    ("queue", "reason"),
    [
        ({}, "the worker"),
        ({"queued": 2, "scoring": 1}, "the reference server scores 3 batches"),
        ({"queued": 2, "leased": 8, "max_in_flight": 8}, "the reference server leases no more batches .*"),
        ({"dead": 1, "expired": 4}, "the worker; batches dead since the start: 1; batches expired since the start: 4"),
    ],
)
def test_why_a_trainer_waits(queue: dict[str, Any], reason: str, clock: list[float]) -> None:
    watched = watch(queue_of(), queue_of(**queue))
    assert watched.wait_reason("the worker") == "the worker", "nothing is known yet"
    for _ in range(2):
        watched.look()
        clock[0] += 2
    assert re.fullmatch(reason, watched.wait_reason("the worker"))


def test_batches_of_an_earlier_run_of_the_name_are_no_reason(clock: list[float]) -> None:
    watched = watch(queue_of(dead=1, expired=8), queue_of(dead=1, expired=9))
    watched.look()
    assert watched.wait_reason("the worker") == "the worker"
    clock[0] += 2
    watched.look()
    assert watched.wait_reason("the worker") == "the worker; batches expired since the start: 1"


def test_samplers_of_an_epoch_that_has_ended_are_named(clock: list[float]) -> None:
    """But not the trainer's worker, whose outbox may have held some when the run was killed."""
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
