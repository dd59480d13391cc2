"""The calls of a history, batch by batch: what each asked of the batch, and what it was told."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any

from tests.chaos.history import Event

_GRANTED = (200, 204)


@dataclass(frozen=True)
class Call:
    """One call on one batch. told: the answer; None if there was none, and the call may have had its effect or not.

    begin, end: monotonic seconds; end is infinite without an answer. content: digest of an uploaded or a leased batch.
    lease: consumer, incarnation and request_id of a lease, or of what ends one.
    """

    verb: str
    begin: float
    end: float = inf
    told: tuple[Any, ...] | None = None
    content: str = ""
    token: str = ""
    lease: tuple[str, str | None, str | None] = ("", None, None)
    seconds: float = 0.0
    started: bool = False
    error: bool = False

    def __str__(self) -> str:
        asked = [
            f"{each.name}={value}" for each in fields(self)[4:] if (value := getattr(self, each.name)) != each.default
        ]
        return f"{self.begin:.3f} to {self.end:.3f}: {self.verb}({', '.join(asked)}) was told {self.told}"


@dataclass
class BatchCalls:
    """Everything that may have touched one batch.

    useless_from: when the first lease by another lineage of its run, or the first end of its own, began: it may expire
    from then on.
    ghosts_from: when the first lease without an answer began that may have got it: from then on it may be leased
    without anybody knowing.
    """

    calls: list[Call] = field(default_factory=list)
    useless_from: float = inf
    ghosts_from: float = inf


def by_batch(events: Iterable[Event]) -> dict[str, BatchCalls]:
    """The calls of a history, for each batch that was uploaded or tried to be."""
    events = [event for event in events if event["kind"] == "call" and not _is_refused(event)]
    leases = [event for event in events if event["verb"] == "lease"]
    ends = [event for event in events if event["verb"] == "finish"]
    batches: dict[str, BatchCalls] = defaultdict(BatchCalls)
    for event in events:
        for id, call in _parts(event):
            batches[id].calls.append(call)
    _add_unanswered_leases(batches, leases)
    _add_ends_of_leases(batches, leases)
    _add_others(batches, leases, ends, {event["id"]: event for event in events if event["verb"] == "upload"})
    return dict(batches)


def _is_undecided(event: Event) -> bool:
    """It happened or not: no answer came, the store broke down, or what was leased found no room to be sent."""
    return event["status"] in (None, 503) or (event["verb"], event["status"]) == ("lease", 429)


def _is_refused(event: Event) -> bool:
    """It did not happen."""
    return event["status"] in (429, 507) and not _is_undecided(event)


def _parts(event: Event) -> Iterable[tuple[str, Call]]:
    """A call on several batches is one on each."""
    call = _timed(event)
    known = call.told is not None
    match event["verb"]:
        case "upload":
            told = (event["status"], event.get("state"))
            yield event["id"], replace(call, content=event["content"], told=told if known else None)
        case "lease":
            for lease in event.get("leases", ()):
                told = (lease["deliveries"],)
                yield lease["id"], replace(call, token=lease["token"], content=lease["content"], told=told)
        case "ack" | "extend" | "release":
            outcomes = event["outcomes"] if known else [None] * len(event["keys"])
            for (id, token), outcome in zip(event["keys"], outcomes, strict=True):
                yield id, replace(call, token=token, told=(outcome,) if known else None)
        case "requeue" | "drop" | "look":
            told = (event["status"], event.get("state"), event.get("deliveries"))
            yield event["id"], replace(call, told=told if known else None)


def _timed(event: Event) -> Call:
    known = not _is_undecided(event)
    return Call(
        event["verb"],
        event["begin"],
        event["end"] if known else inf,
        told=() if known else None,
        lease=(event.get("consumer", ""), event.get("incarnation"), event.get("request_id")),
        seconds=event.get("seconds", 0.0),
        started=event.get("started", False),
        error=event.get("error", False),
    )


def _add_unanswered_leases(batches: Mapping[str, BatchCalls], leases: Sequence[Event]) -> None:
    """A lease without an answer may be the one that a repeat of its request_id was told of."""
    unanswered: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in leases:
        if event["request_id"] and _is_undecided(event):
            unanswered[event["consumer"], event["request_id"]].append(event)
    for batch in batches.values():
        for consumer, request_id, token in {(*_request(call), call.token) for call in _granted(batch)}:
            lost = unanswered.get((consumer, request_id or ""), [])
            batch.calls += [replace(_timed(event), token=token) for event in lost]


def _add_ends_of_leases(batches: Mapping[str, BatchCalls], leases: Sequence[Event]) -> None:
    """What leases of other batches say of this one's: a new incarnation ended it, or a repeat found it ended.

    A repeat is told of all that it still holds.
    """
    takeovers = _takeovers(leases)
    repeats: dict[tuple[str, str], list[tuple[set[str], Call]]] = defaultdict(list)
    for event in leases:
        if event["request_id"] and event["status"] in _GRANTED:
            elsewhere = replace(_timed(event), verb="elsewhere")
            told = {lease["id"] for lease in event.get("leases", ())}
            repeats[event["consumer"], event["request_id"]].append((told, elsewhere))
    for id, batch in batches.items():
        granted = _granted(batch)
        if not granted:
            continue
        first, last = min(call.begin for call in granted), max(call.begin for call in batch.calls)
        for consumer in {call.lease[0] for call in granted}:
            batch.calls += [call for call in takeovers[consumer] if call.end >= first and call.begin <= last]
        for consumer, request_id in {_request(call) for call in granted}:
            others = repeats.get((consumer, request_id or ""), [])
            batch.calls += [call for told, call in others if id not in told and call.end >= first]


def _takeovers(leases: Iterable[Event]) -> Mapping[str, list[Call]]:
    """By consumer: for each incarnation the moment at which it ended the leases of others."""
    asked: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for event in leases:
        if event["incarnation"] and (_is_undecided(event) or event["status"] in _GRANTED):
            asked[event["consumer"], event["incarnation"]].append(_timed(event))
    takeovers: dict[str, list[Call]] = defaultdict(list)
    for (consumer, _), calls in asked.items():
        first = min(calls, key=lambda call: call.end)
        begin = min(call.begin for call in calls)
        takeovers[consumer].append(replace(first, verb="takeover", begin=begin))
    return takeovers


def _add_others(
    batches: Mapping[str, BatchCalls], leases: Iterable[Event], ends: Iterable[Event], uploads: Mapping[str, Event]
) -> None:
    leases_of: dict[tuple[str | None, str | None], float] = {}
    ghosts_of: dict[tuple[str | None, str | None], float] = {}
    for event in leases:
        whose = (event["run"], event["lineage"])
        if _is_undecided(event) or event["status"] in _GRANTED:
            leases_of[whose] = min(event["begin"], leases_of.get(whose, inf))
        if _is_undecided(event):
            ghosts_of[whose] = min(event["begin"], ghosts_of.get(whose, inf))
    for id, batch in batches.items():
        if id in uploads:
            run, lineage = uploads[id]["run"], uploads[id]["lineage"]
            others = [begin for (r, other), begin in leases_of.items() if r == run and other != lineage]
            own = [event["begin"] for event in ends if (event["run"], event["lineage"]) == (run, lineage)]
            batch.useless_from = min([*others, *own], default=inf)
            batch.ghosts_from = min(ghosts_of.get((None, None), inf), ghosts_of.get((run, lineage), inf))


def _granted(batch: BatchCalls) -> list[Call]:
    return [call for call in batch.calls if call.verb == "lease"]


def _request(call: Call) -> tuple[str, str | None]:
    consumer, _, request_id = call.lease
    return consumer, request_id
