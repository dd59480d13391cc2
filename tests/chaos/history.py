"""The events of a chaos test, from which it is judged."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from shared.client import RefServerClient
from tests.chaos.proof import Proof

# kind: what happened. at: seconds since the history began. Everything else depends on the kind.
Event = dict[str, Any]


class History:
    """Append-only. Safe to share between threads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._events: list[Event] = []
        self._began = time.monotonic()
        self._news = threading.Condition()

    def record(self, kind: str, **fields: Any) -> None:
        with self._news:
            event = {"kind": kind, "at": round(time.monotonic() - self._began, 4), **fields}
            self._file.write(json.dumps(event) + "\n")
            self._file.flush()
            self._events.append(event)
            self._news.notify_all()

    def events(self) -> list[Event]:
        with self._news:
            return list(self._events)

    def mark(self) -> int:
        """The current position, for `wait_for`."""
        with self._news:
            return len(self._events)

    def wait_for(self, matches: Callable[[Event], bool], *, since: int, seconds: float) -> Event | None:
        """The first event after the mark `since` that matches; None when none came within `seconds`."""
        deadline = time.monotonic() + seconds
        seen = since
        with self._news:
            while True:
                for event in self._events[seen:]:
                    if matches(event):
                        return event
                seen = len(self._events)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self._news.wait(remaining)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "History":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def record_ending(history: History, url: str) -> None:
    """Records every batch with its state and reason, and the server's counts by state."""
    with RefServerClient(url) as client:
        for batch in client.batches():
            fields = {name: getattr(batch, name) for name in ("id", "run", "state", "reason", "deliveries")}
            history.record("batch", **fields)
        states = client.queue().states
    history.record("counts", states={state: depth.batches for state, depth in states.items() if depth.batches})


STORE_SECONDS = 2.0

_SETTLED = ("done", "expired", "dead")
_SHOWN = 5


def check_kills(events: Sequence[Event], backend: str, bar: str) -> Proof:
    """The history of processes that were killed: no acknowledged upload is lost, no effect is doubled or lost.

    An effect is a batch that the final weights were trained on, according to the run's metrics.
    """
    batches = {event["id"]: event for event in _of(events, "batch")}
    done = {id for id, batch in batches.items() if batch["state"] == "done"}
    acknowledged, acked = acknowledged_uploads(events), _acked(events)
    lineage = [id for step in _of(events, "step") for id in step["batch_ids"]]
    drained = {event["id"] for event in _of(events, "drained")}
    lost = acknowledged - set(batches)
    doubled = _twice(lineage) | (set(lineage) & drained)
    not_in_weights = done - set(lineage) - drained
    restarts = list(_of(events, "restart"))
    account = [
        *_name("acknowledged uploads are lost", lost),
        *_name("effects are doubled", doubled),
        *_name("effects are lost, done but not in the weights", not_in_weights),
        *_name("batches are in the weights, but not done", set(lineage) - done),
        *_name("acks were answered, but the batch is not done", acked - done),
        *_check_batches(events, batches),
        *_check_steps(list(_of(events, "step"))),
    ]
    ended = [event["why"] for event in _of(events, "ended")]  # the test stopped before its end was recorded
    faults = [*(ended or account), *_check_store(events, restarts)]
    states = Counter(batch["state"] for batch in batches.values())
    kills = Counter(event["target"] for event in _of(events, "kill"))
    return Proof(
        "kill", backend, bar, faults,
        {
            "kills": kills.total(),
            **{f"kills of {target}": kills[target] for target in ("server", "trainer", "worker")},
            "acknowledged": len(acknowledged),
            "uploaded again": sum(len(event["ids"]) for event in _answers(events, "upload", 200)),
            "lost": len(lost),
            "effects": len(lineage),
            "leased again": sum(count - 1 for count in _leases(events).values()),
            "doubled": len(doubled),
            **{state: states[state] for state in _SETTLED},
            "drained": len(drained),
            **_spread("store ready, s", [event["store_seconds"] for event in restarts]),
            **_spread("server ready, s", [event["ready_seconds"] for event in restarts]),
        },
    )  # fmt: skip


def check_network(events: Sequence[Event], backend: str, bar: str, uploads: int) -> Proof:
    """The history of a failing network: each upload admitted, leased, consumed and acked exactly once."""
    batches = {event["id"]: event for event in _of(events, "batch")}
    sent = {event["id"]: event["digest"] for event in _of(events, "uploading")}
    uploaded = {event["id"] for event in _of(events, "uploaded")}
    created = Counter(id for event in _answers(events, "upload", 201) for id in event["ids"])
    known = Counter(id for event in _answers(events, "upload", 200) for id in event["ids"])
    consumed = Counter(event["id"] for event in _of(events, "consumed"))
    changed = {event["id"] for event in _of(events, "consumed") if event["digest"] != sent.get(event["id"])}
    settled = Counter(id for event in _answers(events, "ack", 200) for id in _with(event, "ok"))
    broken = [
        *_name(f"uploads are missing of the {uploads} planned", range(uploads - len(uploaded))),
        *_name("uploads are not there", set(sent) - set(batches)),
        *_name("uploads were not admitted exactly once", _not_once(created, sent)),
        *_name("batches were not leased exactly once", _not_once(_leases(events), sent)),
        *_name("batches were not consumed exactly once", _not_once(consumed, sent)),
        *_name("batches came with other content", changed),
        *_name("batches were not acked exactly once", _not_once(settled, sent)),
        *_name("batches are not done", {id for id, batch in batches.items() if batch["state"] != "done"}),
        *_check_batches(events, batches),
    ]
    requests = [event for event in events if event["kind"] in ("answer", "unanswered")]
    faults = Counter(event["fault"] for event in requests if event["fault"])
    return Proof(
        "network", backend, bar, broken,
        {
            "uploads": len(uploaded),
            "requests": len(requests),
            "faulty": f"{faults.total() / max(len(requests), 1):.1%}",
            **dict(sorted(faults.items())),
            "retries": len(list(_of(events, "retry"))),
            "answered 201": created.total(),
            "answered 200": known.total(),
            "done": sum(batch["state"] == "done" for batch in batches.values()),
            "seconds": round(events[-1]["at"] - events[0]["at"], 1),
        },
    )  # fmt: skip


def acknowledged_uploads(events: Iterable[Event]) -> set[str]:
    """Ids whose 2xx has reached the proxy."""
    return {id for event in events for status in (200, 201) for id in _answered(event, "upload", status)}


def _acked(events: Iterable[Event]) -> set[str]:
    return {id for event in _answers(events, "ack", 200) for id in _with(event, "ok", "already")}


def _leases(events: Iterable[Event]) -> Counter[str]:
    """How often each batch was leased; a repeated answer is the same lease."""
    answers = _answers(events, "lease", 200)
    return Counter(id for id, _ in {key for each in answers for key in zip(each["ids"], each["tokens"], strict=True)})


def _check_batches(events: Sequence[Event], batches: Mapping[str, Event]) -> list[str]:
    """Violations at the end: unsettled batches, no reason given, batches that nobody uploaded, wrong counts."""
    requested = {id for event in _of(events, "request") if event["verb"] == "upload" for id in event["ids"]}
    unsettled = {id for id, batch in batches.items() if batch["state"] not in _SETTLED}
    ended = [batch for batch in batches.values() if batch["state"] in ("expired", "dead")]
    listed = Counter(batch["state"] for batch in batches.values())
    counts = [Counter(event["states"]) for event in _of(events, "counts")]
    return [
        *_name("batches are neither done, expired nor dead", unsettled),
        *_name("batches are expired or dead without a reason", {b["id"] for b in ended if not b["reason"]}),
        *_name("batches are there that nobody uploaded", set(batches) - requested),
        *([] if counts == [listed] else [f"the server counts {counts}, and lists {dict(listed)}"]),
    ]


def _check_store(events: Sequence[Event], restarts: Sequence[Event]) -> list[str]:
    damaged = [event["verdict"] for event in _of(events, "integrity") if event["verdict"] != "ok"]
    slow = [event["store_seconds"] for event in restarts if event["store_seconds"] >= STORE_SECONDS]
    return [
        *(f"the store is damaged: {verdict}" for verdict in damaged),
        *(f"the store took {seconds:.2f} s to be ready again" for seconds in slow),
    ]


def _check_steps(steps: Sequence[Event]) -> list[str]:
    numbers = [step["step"] for step in steps]
    return [] if numbers == list(range(1, len(numbers) + 1)) else ["the run's steps are not 1, 2, 3, …"]


def _of(events: Iterable[Event], kind: str) -> Iterable[Event]:
    return (event for event in events if event["kind"] == kind)


def _answered(event: Event, verb: str, status: int) -> list[str]:
    matches = event["kind"] == "answer" and event["verb"] == verb and event["status"] == status
    return event["ids"] if matches else []


def _answers(events: Iterable[Event], verb: str, status: int) -> Iterable[Event]:
    return (event for event in events if _answered(event, verb, status))


def _with(event: Event, *outcomes: str) -> list[str]:
    return [id for id, outcome in zip(event["ids"], event["outcomes"], strict=True) if outcome in outcomes]


def _twice(ids: Iterable[str]) -> set[str]:
    return {id for id, count in Counter(ids).items() if count > 1}


def _not_once(counted: Mapping[str, int], wanted: Iterable[str]) -> set[str]:
    return {id for id in {*wanted, *counted} if counted.get(id, 0) != 1}


def _name(what: str, ids: Collection[object]) -> list[str]:
    """One sentence that names the first few ids; nothing without ids."""
    if not ids:
        return []
    shown = ", ".join(sorted(map(str, ids))[:_SHOWN])
    return [f"{len(ids)} {what}: {shown}{', …' if len(ids) > _SHOWN else ''}"]


def _spread(what: str, seconds: Sequence[float]) -> dict[str, float | str]:
    """Median and largest."""
    if not seconds:
        return {}
    return {f"{what} (median)": round(median(seconds), 2), f"{what} (max)": round(max(seconds), 2)}
