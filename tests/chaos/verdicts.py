"""The events of a chaos test, from which it is judged."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from shared.client import RefServerClient
from tests.chaos.stage import Proof, broken
from tests.harness.history import Event, History


def record_ending(history: History, url: str) -> None:
    """Records every batch with its state and reason, and the server's counts by state."""
    with RefServerClient(url) as client:
        listed = list(client.batches())
        for batch in listed:
            fields = {name: getattr(batch, name) for name in ("id", "run", "state", "reason", "deliveries")}
            history.record("batch", **fields)
        deadline = time.monotonic() + _COUNTS_SECONDS
        while (counts := _counts(client)) != Counter(batch.state for batch in listed) and time.monotonic() < deadline:
            time.sleep(0.05)
    history.record("counts", states=counts)


def _counts(client: RefServerClient) -> dict[str, int]:
    return {state: depth.batches for state, depth in client.queue().states.items() if depth.batches}


STORE_SECONDS = 2.0
# The counts are as old as ten times what it took to read them, at most.
_COUNTS_SECONDS = 10.0

SETTLED = ("done", "expired", "dead")


def check_kills(events: Sequence[Event]) -> Proof:
    """The history of processes that were killed: no acknowledged upload is lost, no effect is doubled or lost.

    An effect is a batch that the final weights were trained on, according to the run's metrics.
    """
    batches = {event["id"]: event for event in _of(events, "batch")}
    done = {id for id, batch in batches.items() if batch["state"] == "done"}
    # An upload counts once its 2xx has reached the proxy.
    uploads = [event for status in (200, 201) for event in _answers(events, "upload", status)]
    acknowledged = {id for event in uploads for id in event["ids"]}
    acked = {id for event in _answers(events, "ack", 200) for id in _with(event, "ok", "already")}
    steps = list(_of(events, "step"))
    lineage = [id for step in steps for id in step["batch_ids"]]
    drained = {event["id"] for event in _of(events, "drained")}
    lost = acknowledged - set(batches)
    doubled = {id for id, count in Counter(lineage).items() if count > 1} | (set(lineage) & drained)
    account = [
        *broken({
            "acknowledged uploads are lost": lost,
            "effects are doubled": doubled,
            "effects are lost, done but not in the weights": done - set(lineage) - drained,
            "batches are in the weights, but not done": set(lineage) - done,
            "acks were answered, but the batch is not done": acked - done,
            "the run's steps are not 1, 2, 3, …": [step["step"] for step in steps] != list(range(1, len(steps) + 1)),
        }),
        *_check_batches(events, batches),
    ]  # fmt: skip
    ended = [event["why"] for event in _of(events, "ended")]  # the test stopped before its end was recorded
    damaged = [event["verdict"] for event in _of(events, "integrity") if event["verdict"] != "ok"]
    seconds = [event["store_seconds"] for event in _of(events, "restart")]
    faults = [
        *(ended or account),
        *(f"the store is damaged: {verdict}" for verdict in damaged),
        *(f"the store took {slow:.2f} s to be ready again" for slow in seconds if slow >= STORE_SECONDS),
    ]
    kills = Counter(event["target"] for event in _of(events, "kill"))
    figures = {
        "kills": kills.total(),
        "of them of the server": kills["server"],
        "acknowledged": len(acknowledged),
        "lost": len(lost),
        "effects": len(lineage),
        "leased again": sum(count - 1 for count in _leases(events).values()),
        "doubled": len(doubled),
        "store ready, s (max)": max(seconds, default=0.0),
    }
    return Proof(faults, figures)


def check_network(events: Sequence[Event], uploads: int) -> Proof:
    """The history of a failing network: each upload admitted, leased, consumed and acked exactly once."""
    batches = {event["id"]: event for event in _of(events, "batch")}
    sent = {event["id"]: event["digest"] for event in _of(events, "uploading")}
    uploaded = {event["id"] for event in _of(events, "uploaded")}
    created = Counter(id for event in _answers(events, "upload", 201) for id in event["ids"])
    consumed = Counter(event["id"] for event in _of(events, "consumed"))
    changed = {event["id"] for event in _of(events, "consumed") if event["digest"] != sent.get(event["id"])}
    settled = Counter(id for event in _answers(events, "ack", 200) for id in _with(event, "ok"))
    wrong = [
        *broken({
            f"uploads are missing of the {uploads} planned": range(uploads - len(uploaded)),
            "uploads are not there": set(sent) - set(batches),
            "uploads were not admitted exactly once": _not_once(created, sent),
            "batches were not leased exactly once": _not_once(_leases(events), sent),
            "batches were not consumed exactly once": _not_once(consumed, sent),
            "batches came with other content": changed,
            "batches were not acked exactly once": _not_once(settled, sent),
            "batches are not done": {id for id, batch in batches.items() if batch["state"] != "done"},
        }),
        *_check_batches(events, batches),
    ]  # fmt: skip
    requests = [event for event in events if event["kind"] in ("answer", "unanswered")]
    faults = Counter(event["fault"] for event in requests if event["fault"])
    figures = {
        "uploads": len(uploaded),
        "requests": len(requests),
        "faulty": f"{faults.total() / max(len(requests), 1):.1%}",
        **dict(sorted(faults.items())),
        "retries": len(list(_of(events, "retry"))),
        "seconds": round(events[-1]["at"] - events[0]["at"], 1),
    }
    return Proof(wrong, figures)


def _leases(events: Iterable[Event]) -> Counter[str]:
    """How often each batch was leased; a repeated answer is the same lease."""
    answers = _answers(events, "lease", 200)
    return Counter(id for id, _ in {key for each in answers for key in zip(each["ids"], each["tokens"], strict=True)})


def _check_batches(events: Sequence[Event], batches: Mapping[str, Event]) -> list[str]:
    """Violations at the end: unsettled batches, no reason given, batches that nobody uploaded, wrong counts."""
    requested = {id for event in _of(events, "request") if event["verb"] == "upload" for id in event["ids"]}
    unsettled = {id for id, batch in batches.items() if batch["state"] not in SETTLED}
    ended = [batch for batch in batches.values() if batch["state"] in ("expired", "dead")]
    listed = Counter(batch["state"] for batch in batches.values())
    counts = [Counter(event["states"]) for event in _of(events, "counts")]
    return broken({
        "batches are neither done, expired nor dead": unsettled,
        "batches are expired or dead without a reason": {batch["id"] for batch in ended if not batch["reason"]},
        "batches are there that nobody uploaded": set(batches) - requested,
        f"the server counts {counts}, and lists {dict(listed)}": counts != [listed],
    })  # fmt: skip


def _of(events: Iterable[Event], kind: str) -> Iterable[Event]:
    return (event for event in events if event["kind"] == kind)


def _answers(events: Iterable[Event], verb: str, status: int) -> Iterable[Event]:
    known = ("answer", verb, status)
    return (event for event in events if (event["kind"], event.get("verb"), event.get("status")) == known)


def _with(event: Event, *outcomes: str) -> list[str]:
    return [id for id, outcome in zip(event["ids"], event["outcomes"], strict=True) if outcome in outcomes]


def _not_once(counted: Mapping[str, int], wanted: Iterable[str]) -> set[str]:
    return {id for id in {*wanted, *counted} if counted.get(id, 0) != 1}
