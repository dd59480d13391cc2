"""The checker passes a good history, and finds the fault in each bad one."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.history import Event, acknowledged_uploads, check_kills, check_network


def event(kind: str, **fields: Any) -> Event:
    return {"kind": kind, "at": 0.0, **fields}


def upload(id: str, status: int = 201) -> list[Event]:
    return [
        event("request", verb="upload", number=1, ids=[id]),
        event("answer", verb="upload", number=1, status=status, ids=[id], fault=None),
    ]


def answer(verb: str, ids: list[str], **fields: Any) -> Event:
    return event("answer", verb=verb, number=1, status=200, ids=ids, **{"fault": None, **fields})


def batch(id: str, state: str, reason: str | None = None) -> Event:
    return event("batch", id=id, run="run", state=state, reason=reason, deliveries=0)


def find(events: list[Event], kind: str, **fields: Any) -> Event:
    return next(e for e in events if e["kind"] == kind and all(e.get(key) == value for key, value in fields.items()))


def kills() -> list[Event]:
    """Six uploads: a and b trained and acked, c drained, d expired, e dead; f was never answered and is not stored."""
    return [
        *(each for id in "abcde" for each in upload(id)),
        event("request", verb="upload", number=1, ids=["f"]),
        event("unanswered", verb="upload", number=1, why="the server is down", fault=None),
        event("kill", target="server"),
        event("integrity", verdict="ok"),
        event("restart", store_seconds=0.1, ready_seconds=0.9),
        answer("ack", ["a", "b"], outcomes=["ok", "already"]),
        event("drained", id="c"),
        event("step", step=1, epoch=0, batch_ids=["a"]),
        event("step", step=2, epoch=1, batch_ids=["b"]),
        *(batch(id, "done") for id in "abc"),
        batch("d", "expired", "abandoned"),
        batch("e", "dead", "5 deliveries failed"),
        event("counts", states={"done": 3, "expired": 1, "dead": 1}),
    ]


def test_a_good_history_of_kills_passes() -> None:
    verdict = check_kills(kills())
    assert verdict.violations == []
    counted = ("kills", "acknowledged", "lost", "effects", "doubled", "done", "expired", "dead", "drained")
    assert [verdict.figures[name] for name in counted] == [1, 5, 0, 2, 0, 3, 1, 1, 1]
    assert verdict.figures["store ready, s (max)"] == 0.1
    assert verdict.proof("kill", "sqlite", "a bar").passed


def change(kind: str, changes: dict[str, Any], **fields: Any) -> Callable[[list[Event]], None]:
    return lambda events: find(events, kind, **fields).update(changes)


def remove(kind: str, **fields: Any) -> Callable[[list[Event]], None]:
    return lambda events: events.remove(find(events, kind, **fields))


def add(*more: Event) -> Callable[[list[Event]], None]:
    return lambda events: events.extend(more)


@pytest.mark.parametrize(
    ("fault", "violation"),
    [
        (remove("batch", id="d"), "1 acknowledged uploads are lost: d"),
        (add(*upload("g", 200)), "1 acknowledged uploads are lost: g"),
        (change("batch", {"state": "leased"}, id="d"), "1 batches are neither done, expired nor dead: d"),
        (change("batch", {"reason": None}, id="d"), "1 batches are expired or dead without a reason: d"),
        (change("batch", {"reason": ""}, id="e"), "1 batches are expired or dead without a reason: e"),
        (add(event("step", step=3, epoch=1, batch_ids=["a"])), "1 effects are doubled: a"),
        (change("step", {"batch_ids": ["a", "a"]}, step=1), "1 effects are doubled: a"),
        (add(event("drained", id="a")), "1 effects are doubled: a"),
        (change("step", {"batch_ids": []}, step=2), "1 effects are lost, done but not in the weights: b"),
        (remove("drained"), "1 effects are lost, done but not in the weights: c"),
        (change("step", {"batch_ids": ["a", "d"]}, step=1), "1 batches are in the weights, but not done: d"),
        (change("batch", {"state": "dead", "reason": "x"}, id="b"), "1 batches are in the weights, but not done: b"),
        (change("answer", {"outcomes": ["ok", "ok"], "ids": ["b", "d"]}, verb="ack"), "1 acks were answered"),
        (add(batch("g", "done"), event("drained", id="g")), "1 batches are there that nobody uploaded: g"),
        (change("counts", {"states": {"done": 4, "expired": 1}}), "the server counts"),
        (remove("counts"), "the server counts"),
        (change("integrity", {"verdict": "row 3 missing from index"}), "the store is damaged: row 3 missing"),
        (change("restart", {"store_seconds": 2.1}), "the store took 2.10 s to be ready again"),
        (add(event("ended", why="worker ended with status 1")), "worker ended with status 1"),
        (change("step", {"step": 3}, step=2), "the run's steps are not"),
    ],
)  # fmt: skip
def test_a_fault_among_kills_is_found(fault: Callable[[list[Event]], None], violation: str) -> None:
    events = kills()
    fault(events)
    verdict = check_kills(events)
    assert any(violation in found for found in verdict.violations), verdict.violations
    proof = verdict.proof("kill", "sqlite", "a bar")
    assert not proof.passed and violation in str(proof.figures["violations"])


def test_only_a_2xx_acknowledges() -> None:
    refused = [event("answer", verb="upload", number=1, status=429, ids=[], fault=None)]
    lost = [event("answer", verb="upload", number=1, status=201, ids=["b"], fault="lost answer")]
    assert acknowledged_uploads([*upload("a"), *refused, *lost]) == {"a", "b"}


def network() -> list[Event]:
    """Two uploads; the answer to the first was lost, so that it came twice."""
    return [
        *(event("uploading", id=id, digest=f"digest of {id}") for id in "ab"),
        *upload("a"), *upload("a", 200), *upload("b"),
        event("retry", reason="does not answer"),
        *(event("uploaded", id=id) for id in "ab"),
        event("unanswered", verb="lease", number=1, why="reset", fault="reset"),
        *(answer("lease", [id], tokens=[f"token of {id}"]) for id in "aab"),
        *(event("consumed", id=id, digest=f"digest of {id}") for id in "ab"),
        answer("ack", ["a", "b"], outcomes=["ok", "ok"], fault="lost answer"),
        answer("ack", ["a", "b"], outcomes=["already", "already"]),
        *(batch(id, "done") for id in "ab"),
        event("counts", states={"done": 2}),
    ]  # fmt: skip


def test_a_good_history_of_a_network_passes() -> None:
    verdict = check_network(network(), uploads=2)
    assert verdict.violations == []
    counted = (
        "uploads",
        "requests",
        "faulty",
        "reset",
        "lost answer",
        "retries",
        "answered 201",
        "answered 200",
        "done",
    )
    assert [verdict.figures[name] for name in counted] == [2, 9, "22.2%", 1, 1, 1, 2, 1, 2]


@pytest.mark.parametrize(
    ("fault", "violation"),
    [
        (remove("uploaded", id="a"), "1 uploads are missing of the 2 planned"),
        (remove("batch", id="a"), "1 uploads are not there: a"),
        (add(*upload("a")), "1 uploads were not admitted exactly once: a"),
        (change("answer", {"status": 200}, verb="upload", ids=["b"]), "1 uploads were not admitted exactly once: b"),
        (add(answer("lease", ["a"], tokens=["another token"])), "1 batches were not leased exactly once: a"),
        (remove("answer", verb="lease", ids=["b"]), "1 batches were not leased exactly once: b"),
        (add(event("consumed", id="a", digest="digest of a")), "1 batches were not consumed exactly once: a"),
        (change("consumed", {"digest": "other"}, id="b"), "1 batches came with other content: b"),
        (add(answer("ack", ["a"], outcomes=["ok"])), "1 batches were not acked exactly once: a"),
        (change("answer", {"outcomes": ["ok", "stale"]}, verb="ack"), "1 batches were not acked exactly once: b"),
        (change("batch", {"state": "ready"}, id="a"), "1 batches are not done: a"),
        (change("batch", {"state": "dead", "reason": "x"}, id="a"), "1 batches are not done: a"),
        (add(batch("c", "done")), "1 batches are there that nobody uploaded: c"),
        (change("counts", {"states": {"done": 1}}), "the server counts"),
    ],
)
def test_a_fault_of_a_network_is_found(fault: Callable[[list[Event]], None], violation: str) -> None:
    events = network()
    fault(events)
    found = check_network(events, uploads=2).violations
    assert any(violation in each for each in found), found
