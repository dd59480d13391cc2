"""The server gets all records of a run, in order, and never holds up the run."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from policy_trainer.reporting import server_metrics
from policy_trainer.reporting.samples import SampledCompletion, SampledGroup
from policy_trainer.reporting.server_metrics import ServerMetrics, settings_record
from shared.api import MAX_RECORD_BYTES
from shared.client import RefServerClient
from tests.harness.processes import until
from tests.site import Site, open_site

__all__ = ["open_site"]

KEPT = b'{"kept": 1}'
Opener = Callable[..., Site]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "_EVERY_SECONDS", 0.001)
    monkeypatch.setattr(server_metrics, "_RETRY_SECONDS", 0.002)


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, **fields}


def received(site: Site) -> list[dict[str, Any]]:
    """All records that the server got, in order."""
    return [record for request in site.requests for record in json.loads(request.body)["records"]]


class Sender:
    def __init__(self) -> None:
        self.notes: list[str] = []

    @contextmanager
    def sending(self, url: str, *, after: int = -1, past: tuple[dict[str, Any], ...] = ()) -> Iterator[ServerMetrics]:
        client = RefServerClient(url, patience=0)
        with closing(ServerMetrics(client, "my run", "one", after=after, past=past, note=self.notes.append)) as metrics:
            yield metrics


@pytest.fixture
def sender() -> Sender:
    return Sender()


@pytest.fixture
def site(open_site: Opener) -> Site:
    """A server that keeps what it gets."""
    return open_site(lambda _: Site.answer(200, KEPT))


def test_a_bug_costs_only_the_records_that_met_it_and_is_reported(
    site: Site, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = RefServerClient.report_metrics

    def fail_first(*arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(RefServerClient, "report_metrics", report)
        raise TypeError("a bug")

    monkeypatch.setattr(RefServerClient, "report_metrics", fail_first)
    with sender.sending(site.url) as metrics:
        metrics.write(step(1))
        until(lambda: bool(sender.notes))
        metrics.write(step(2))
        until(lambda: bool(site.requests))
    assert [record["step"] for record in received(site)] == [2]
    assert "only metrics.jsonl has them: TypeError('a bug')" in sender.notes[0]


def test_all_records_arrive_in_order_by_the_end(site: Site, sender: Sender) -> None:
    with sender.sending(site.url, after=4, past=(step(3), step(4))) as metrics:
        for number in range(5, 600):
            metrics.write(step(number, kl=float("nan"), parts={"a": float("inf")}))
    assert [record["step"] for record in received(site)] == list(range(3, 600))
    assert received(site)[-1] == step(599, kl=None, parts={"a": None})
    bodies = [json.loads(request.body) for request in site.requests]
    assert {(request.method, request.path) for request in site.requests} == {("POST", "/v1/runs/my%20run/metrics")}
    assert {body["lineage"] for body in bodies} == {"one"}
    assert [body.get("after") for body in bodies] == [4] + [None] * (len(bodies) - 1)
    assert max(len(body["records"]) for body in bodies) <= 256
    assert not sender.notes


def test_a_server_that_is_away_for_a_while_gets_it_later(open_site: Opener, sender: Sender) -> None:
    answers = iter([None, open_answer(503), open_answer(429), open_answer(500), open_answer(507)])
    site = open_site(lambda _: next(answers, site.answer(200, KEPT)))
    with sender.sending(site.url, after=7) as metrics:
        metrics.write(step(8))
        until(lambda: len(site.requests) == 6)
        metrics.write(step(9))
    bodies = [json.loads(request.body) for request in site.requests]
    assert [body.get("after") for body in bodies[:6]] == [7] * 6
    assert [record["step"] for record in bodies[-1]["records"]] == [9]
    assert not sender.notes


def open_answer(status: int) -> Any:
    return Site.answer(status, json.dumps({"error": {"code": "busy", "message": "later"}}).encode())


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_does_not_allow_it_gets_no_second_request(open_site: Opener, sender: Sender, status: int) -> None:
    site = open_site(lambda _: open_answer(status))
    with sender.sending(site.url) as metrics:
        metrics.write(step(1))
        until(lambda: sender.notes)
        for number in range(2, 20):
            metrics.write(step(number))
    assert len(site.requests) == len(sender.notes) == 1
    assert "keeps no metrics" in sender.notes[0]


def test_a_record_that_is_refused_holds_up_no_other(open_site: Opener, sender: Sender) -> None:
    def respond(request: Any) -> Any:
        bad = any(record["step"] % 2 for record in json.loads(request.body)["records"])
        return open_answer(422) if bad else site.answer(200, KEPT)

    site = open_site(respond)
    with sender.sending(site.url) as metrics:
        for number in range(1, 5):
            metrics.write(step(number))
            until(lambda number=number: received(site)[-1:] == [step(number)])
    assert [record["step"] for record in received(site)] == [1, 2, 3, 4]
    assert len(sender.notes) == 1


def test_a_server_that_hangs_holds_up_neither_a_step_nor_the_end(
    open_site: Opener, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_metrics, "_CLOSING_SECONDS", 0.05)
    answered = threading.Event()
    site = open_site(lambda _: (answered.wait(), site.answer(200, KEPT))[1])
    with sender.sending(site.url) as metrics:
        for number in range(10):
            metrics.write(step(number))
        until(lambda: site.requests)
    assert not answered.is_set()  # it has ended all the same
    answered.set()


def test_the_oldest_are_dropped_while_the_server_is_away(
    open_site: Opener, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_metrics, "_MOST", 3)
    there = threading.Event()
    site = open_site(lambda _: site.answer(200, KEPT) if there.is_set() else None)
    with sender.sending(site.url) as metrics:
        for number in range(8):
            metrics.write(step(number))
        before = len(site.requests)
        there.set()
        until(lambda: received(site)[-1:] == [step(7)] and len(site.requests) > before)
    assert json.loads(site.requests[-1].body)["records"] == [step(5), step(6), step(7)]
    assert len(sender.notes) == 1 and "oldest" in sender.notes[0]


def test_a_step_of_very_many_batches_is_sent_without_their_ids(site: Site, sender: Sender) -> None:
    with sender.sending(site.url) as metrics:
        metrics.write(step(1, reward=0.5, batch_ids=["x" * 36] * (MAX_RECORD_BYTES // 36)))
    assert received(site) == [step(1, reward=0.5)]


def test_a_run_that_records_nothing_sends_nothing(site: Site, sender: Sender) -> None:
    with sender.sending(site.url, past=(step(1),)):
        pass
    assert not site.requests


def test_held_out_problems_are_sent_with_their_answers_and_training_groups_are_not(site: Site, sender: Sender) -> None:
    answer = SampledCompletion("x" * 5000, math.nan, {}, None, 7, finished=True)
    groups = [SampledGroup(4, kind, None, None, 2, "6*7=?", "42", (answer,)) for kind in ("eval", "train")]
    with sender.sending(site.url) as metrics:
        metrics.write_samples(groups)
    assert received(site) == [
        {
            "kind": "samples", "step": 4, "name": "2", "prompt": "6*7=?", "answer": "42",
            "completions": [{"text": "x" * 4000, "reward": None, "tokens": 7, "finished": True}],
        }
    ]  # fmt: skip


def test_settings_that_differ_from_their_defaults_are_named_apart() -> None:
    record = settings_record({"seed": 3, "max_steps": 10}, {"seed": 0, "max_steps": 10})
    assert record == {"kind": "settings", "step": 0, "changed": {"seed": 3}, "unchanged": {"max_steps": 10}}


def test_held_out_texts_of_any_script_fit_into_a_record(site: Site, sender: Sender) -> None:
    answers = tuple(SampledCompletion("漢" * 4000, 1.0, {}, None, 7, finished=True) for _ in range(8))
    with sender.sending(site.url) as metrics:
        metrics.write_samples([SampledGroup(4, "eval", None, None, 2, "漢" * 9000, "漢", answers)])
    (record,) = received(site)
    assert len(record["completions"]) == 8 and len(record["completions"][0]["text"]) == 1000


def test_the_past_of_a_long_run_is_no_sign_of_an_absent_server(site: Site, sender: Sender) -> None:
    past = tuple(step(number) for number in range(server_metrics._MOST))
    with sender.sending(site.url, past=past) as metrics:
        metrics.write({"kind": "settings", "step": 0})
    assert sender.notes == []
