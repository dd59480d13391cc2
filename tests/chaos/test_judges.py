"""Each judge of the chaos tests accepts a correct record, and reports exactly the fault of a wrong one."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.chaos import clock, database, engine, frozen, ranks, resume, trouble
from tests.chaos.history import Event, check_kills, check_network


def event(kind: str, **fields: Any) -> Event:
    return {"kind": kind, "at": 0.0, **fields}


def answer(verb: str, ids: list[str], status: int = 200, **fields: Any) -> Event:
    return event("answer", verb=verb, number=1, status=status, ids=ids, **{"fault": None, **fields})


def upload(id: str, status: int = 201) -> list[Event]:
    return [event("request", verb="upload", number=1, ids=[id]), answer("upload", [id], status)]


def batch(id: str, state: str, reason: str | None = None) -> Event:
    return event("batch", id=id, run="run", state=state, reason=reason, deliveries=0)


def kills() -> list[Event]:
    """Five uploads: a and b trained and acked, c drained, d expired, e dead."""
    return [
        *(each for id in "abcde" for each in upload(id)),
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


def network() -> list[Event]:
    """Two uploads; the answer to the first was lost, so it was sent twice."""
    return [
        *(event("uploading", id=id, digest=id) for id in "ab"),
        *upload("a"), *upload("a", 200), *upload("b"),
        *(event("uploaded", id=id) for id in "ab"),
        *(answer("lease", [id], tokens=[f"token of {id}"]) for id in "aab"),
        *(event("consumed", id=id, digest=id) for id in "ab"),
        answer("ack", ["a", "b"], outcomes=["ok", "ok"], fault="lost answer"),
        answer("ack", ["a", "b"], outcomes=["already", "already"]),
        *(batch(id, "done") for id in "ab"),
        event("counts", states={"done": 2}),
    ]  # fmt: skip


HISTORIES: dict[str, tuple[Callable[[], list[Event]], Callable[[list[Event]], Sequence[str]]]] = {
    "kills": (kills, lambda events: check_kills(events).violations),
    "network": (network, lambda events: check_network(events, uploads=2).violations),
}


@pytest.mark.parametrize(
    ("name", "kind", "fields", "change", "violation"),
    [
        ("kills", "batch", {"id": "d"}, None, "1 acknowledged uploads are lost: d"),
        ("kills", "batch", {"id": "d"}, {"state": "leased"}, "1 batches are neither done, expired nor dead: d"),
        ("kills", "batch", {"id": "d"}, {"reason": None}, "1 batches are expired or dead without a reason: d"),
        ("kills", "step", {"step": 1}, {"batch_ids": ["a", "a"]}, "1 effects are doubled: a"),
        ("kills", "step", {"step": 2}, {"batch_ids": []}, "1 effects are lost, done but not in the weights: b"),
        ("kills", "drained", {}, None, "1 effects are lost, done but not in the weights: c"),
        ("kills", "counts", {}, {"states": {"done": 4, "expired": 1}}, "the server counts"),
        ("kills", "integrity", {}, {"verdict": "row 3 missing from index"}, "the store is damaged: row 3 missing"),
        ("kills", "restart", {}, {"store_seconds": 2.1}, "the store took 2.10 s to be ready again"),
        ("network", "uploaded", {"id": "a"}, None, "1 uploads are missing of the 2 planned"),
        ("network", "batch", {"id": "a"}, None, "1 uploads are not there: a"),
        ("network", "answer", {"verb": "lease", "ids": ["b"]}, None, "1 batches were not leased exactly once: b"),
        ("network", "consumed", {"id": "b"}, {"digest": "other"}, "1 batches came with other content: b"),
        ("network", "answer", {"verb": "ack"}, {"outcomes": ["ok", "stale"]}, "not acked exactly once: b"),
    ],
)
def test_a_fault_in_a_history_is_found(
    name: str, kind: str, fields: dict[str, Any], change: dict[str, Any] | None, violation: str
) -> None:
    """change: fields of the first such event; None removes it."""
    history, check = HISTORIES[name]
    events = history()
    assert check(events) == []
    changed = next(each for each in events if each["kind"] == kind and fields.items() <= each.items())
    if change is None:
        events.remove(changed)
    else:
        changed.update(change)
    assert any(violation in each for each in check(events)), check(events)


BATCHES = [engine.Arrived(0, "1", 1e-6), engine.Arrived(1, "1", 0.0), engine.Arrived(2, "2", 1e-5)]
ENDING = engine.Ending("3", 2, "waiting for the vLLM server at … cannot load the weights")
FREEZE = frozen.Freeze("a", True, True, "stale", "ok")
TROUBLE = trouble.Trouble(
    admitted=["a", "b"], refused=["b"], answers=[("upload", 507), ("ack", 200)], reason="the disk is full",
    acked=["a"], known={"a": "done", "b": "done"}, again=[201], alive=True,
)  # fmt: skip
MOVE = clock.Move(86_400, 86_399, ["ok"] * 3, 1.9, 0)
LOAD = database.Load(["a", "b"], [("a", "1", "ok"), ("b", "2", "stale"), ("b", "3", "already")], ["away"])
AFTERMATH = database.Aftermath({"a": 1, "b": 1}, {"done": 2}, [0.5, 1.0], True)
CALM = resume.Ending(["a", "b"], {"w": "1"}, {"done": 2})
KILL = ranks.Kill("1", 2, False, 3.0, "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 77)\n")
JUDGES: dict[str, tuple[Any, Callable[[Any], Sequence[str]], Sequence[dict[str, Any]]]] = {
    "engine batch": (
        BATCHES[2],
        lambda last: engine.judge([*BATCHES[:2], last], ENDING),
        [{"difference": 0.1}, {"difference": float("nan")}, {"version": "3"}],
    ),
    "engine ending": (ENDING, lambda end: engine.judge(BATCHES, end), [{"status": 0}, {"log": "the vLLM server at"}]),
    "frozen": (
        FREEZE,
        lambda freeze: frozen.judge([freeze], {"a": 1}, 1),
        [{"sleeper_outcome": "ok"}, {"holder_outcome": "stale"}, {"stopped": False}],
    ),
    "trouble": (
        TROUBLE,
        lambda each: trouble.judge(each, (507, 503), "disk is full"),
        [{"answers": [("upload", 500)]}, {"reason": ""}, {"known": {"b": "done", "a": "dead"}, "acked": []},
         {"again": [200]}, {"alive": False}],
    ),
    "clock": (
        MOVE,
        lambda move: clock.judge([move], Counter(done=3)),
        [{"seen": 0}, {"kept": ["stale", "ok", "ok"]}, {"came_back": None}, {"came_back": 0.4}, {"others": 1}],
    ),
    "database clients": (
        LOAD,
        lambda load: database.judge(load, AFTERMATH, 2),
        [{"admitted": ["a", "b", "c"]}, {"acks": [("a", "1", "ok"), ("a", "2", "ok")]}, {"outages": []}],
    ),
    "database end": (
        AFTERMATH,
        lambda end: database.judge(LOAD, end, 2),
        [{"done": {"a": 1, "b": 2}}, {"states": {"done": 1, "leased": 1}}, {"went_on": [0.5]}, {"same_process": False}],
    ),
    "resume": (
        CALM,
        lambda killed: resume.compare(CALM, killed, ["a", "b"]),
        [{"trained": ["a", "b", "b"]}, {"weights": {"w": "3"}}, {"states": {"done": 1, "dead": 1}}, {"ledger": ["a"]}],
    ),
    "ranks": (KILL, lambda kill: ranks.judge([kill], 1), [{"seconds": 61.0}, {"words": ""}]),
}  # fmt: skip


@pytest.mark.parametrize("name", JUDGES)
def test_a_fault_in_a_record_is_found(name: str) -> None:
    record, judge, faults = JUDGES[name]
    assert judge(record) == []
    for fault in faults:
        assert len(judge(replace(record, **fault))) == 1, fault
