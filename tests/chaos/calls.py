"""Sends calls to servers and records them; sorts the calls of a history by batch, each with its request and reply."""

import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any

import httpx

from shared import wire
from shared.batch import Batch
from tests.harness.history import Event, History

_GRANTED = (200, 204)


@dataclass(frozen=True)
class Call:
    """One call on one batch. reply: None if there was none, and the call may or may not have had its effect.

    begin, end: monotonic seconds; end is infinite without an answer. content: digest of an uploaded or a leased batch.
    lease: consumer, incarnation and request_id of a lease, or of what ends one.
    """

    verb: str
    begin: float
    end: float = inf
    reply: tuple[Any, ...] | None = None
    content: str = ""
    token: str = ""
    lease: tuple[str, str | None, str | None] = ("", None, None)
    seconds: float = 0.0
    started: bool = False
    error: bool = False

    def __str__(self) -> str:
        arguments = [
            f"{each.name}={value}" for each in fields(self)[4:] if (value := getattr(self, each.name)) != each.default
        ]
        return f"{self.begin:.3f} to {self.end:.3f}: {self.verb}({', '.join(arguments)}) returned {self.reply}"


@dataclass
class BatchCalls:
    """Everything that may have affected one batch.

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
    """Whether it took effect is unknown: no answer, a failing store, or no room to send the leased batches."""
    return event["status"] in (None, 503) or (event["verb"], event["status"]) == ("lease", 429)


def _is_refused(event: Event) -> bool:
    """It had no effect."""
    return event["status"] in (429, 507) and not _is_undecided(event)


def _parts(event: Event) -> Iterable[tuple[str, Call]]:
    """A call on several batches counts as one call on each."""
    call = _timed(event)
    known = call.reply is not None
    match event["verb"]:
        case "upload":
            reply = (event["status"], event.get("state"))
            yield event["id"], replace(call, content=event["content"], reply=reply if known else None)
        case "lease":
            for lease in event.get("leases", ()):
                reply = (lease["deliveries"],)
                yield lease["id"], replace(call, token=lease["token"], content=lease["content"], reply=reply)
        case "ack" | "extend" | "release":
            outcomes = event["outcomes"] if known else [None] * len(event["keys"])
            for (id, token), outcome in zip(event["keys"], outcomes, strict=True):
                yield id, replace(call, token=token, reply=(outcome,) if known else None)
        case "requeue" | "drop" | "look":
            reply = (event["status"], event.get("state"), event.get("deliveries"))
            yield event["id"], replace(call, reply=reply if known else None)


def _timed(event: Event) -> Call:
    known = not _is_undecided(event)
    return Call(
        event["verb"],
        event["begin"],
        event["end"] if known else inf,
        reply=() if known else None,
        lease=(event.get("consumer", ""), event.get("incarnation"), event.get("request_id")),
        seconds=event.get("seconds", 0.0),
        started=event.get("started", False),
        error=event.get("error", False),
    )


def _add_unanswered_leases(batches: Mapping[str, BatchCalls], leases: Sequence[Event]) -> None:
    """A lease without an answer may be the one that a repeat with its request_id returned."""
    unanswered: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in leases:
        if event["request_id"] and _is_undecided(event):
            unanswered[event["consumer"], event["request_id"]].append(event)
    for batch in batches.values():
        for consumer, request_id, token in {(*_request(call), call.token) for call in _granted(batch)}:
            lost = unanswered.get((consumer, request_id or ""), [])
            batch.calls += [replace(_timed(event), token=token) for event in lost]


def _add_ends_of_leases(batches: Mapping[str, BatchCalls], leases: Sequence[Event]) -> None:
    """Adds what leases of other batches imply for this one: a new incarnation, or a repeat without it, ended its lease.

    A repeat returns all leases that it still holds.
    """
    takeovers = _takeovers(leases)
    repeats: dict[tuple[str, str], list[tuple[set[str], Call]]] = defaultdict(list)
    for event in leases:
        if event["request_id"] and event["status"] in _GRANTED:
            elsewhere = replace(_timed(event), verb="elsewhere")
            reply = {lease["id"] for lease in event.get("leases", ())}
            repeats[event["consumer"], event["request_id"]].append((reply, elsewhere))
    for id, batch in batches.items():
        granted = _granted(batch)
        if not granted:
            continue
        first, last = min(call.begin for call in granted), max(call.begin for call in batch.calls)
        for consumer in {call.lease[0] for call in granted}:
            batch.calls += [call for call in takeovers[consumer] if call.end >= first and call.begin <= last]
        for consumer, request_id in {_request(call) for call in granted}:
            others = repeats.get((consumer, request_id or ""), [])
            batch.calls += [call for reply, call in others if id not in reply and call.end >= first]


def _takeovers(leases: Iterable[Event]) -> Mapping[str, list[Call]]:
    """By consumer: for each incarnation the moment at which it ended the leases of others."""
    requests: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for event in leases:
        if event["incarnation"] and (_is_undecided(event) or event["status"] in _GRANTED):
            requests[event["consumer"], event["incarnation"]].append(_timed(event))
    takeovers: dict[str, list[Call]] = defaultdict(list)
    for (consumer, _), calls in requests.items():
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
            finishes = [event["begin"] for event in ends if (event["run"], event["lineage"]) == (run, lineage)]
            batch.useless_from = min([*others, *finishes], default=inf)
            batch.ghosts_from = min(ghosts_of.get((None, None), inf), ghosts_of.get((run, lineage), inf))


def _granted(batch: BatchCalls) -> list[Call]:
    return [call for call in batch.calls if call.verb == "lease"]


def _request(call: Call) -> tuple[str, str | None]:
    consumer, _, request_id = call.lease
    return consumer, request_id


Key = dict[str, str]

_PATIENCE = 30.0


class Caller:
    """Not safe to share between threads. Each method returns the status of the answer, None if there was none."""

    def __init__(self, urls: Sequence[str], history: History, chance: random.Random) -> None:
        self._urls = urls
        self._history = history
        self._chance = chance
        self._http = httpx.Client(timeout=_PATIENCE)

    def upload(self, batch: Batch) -> int | None:
        body = wire.encode(batch)
        request = {"id": batch.id, "run": batch.run, "lineage": batch.lineage, "content": _digest(body)}
        return self._send("upload", request, "POST", "/batches", body, _state)[0]

    def lease(self, body: dict[str, Any]) -> tuple[int | None, list[Key]]:
        """The status, and the keys of the leases."""
        names = ("consumer", "incarnation", "request_id", "run", "lineage")
        request = {**{name: body.get(name) for name in names}, "seconds": body["lease_seconds"]}
        status, reply = self._send("lease", request, "POST", "/batches/lease", body, _leased)
        return status, [{"id": lease["id"], "token": lease["token"]} for lease in reply.get("leases", ())]

    def settle(self, verb: str, keys: Sequence[Key], **more: Any) -> int | None:
        """verb: ack, extend or release."""
        seconds, started, error = more.get("lease_seconds", 0.0), more.get("started", False), "error" in more
        named = [(key["id"], key["token"]) for key in keys]
        request = {"keys": named, "seconds": seconds, "started": started, "error": error}
        return self._send(verb, request, "POST", f"/leases/{verb}", {"leases": list(keys), **more}, _outcomes)[0]

    def requeue(self, id: str) -> None:
        self._send("requeue", {"id": id}, "POST", f"/batches/{id}/requeue", None, _state)

    def drop(self, id: str) -> None:
        self._send("drop", {"id": id}, "DELETE", f"/batches/{id}", None, lambda _: {})

    def finish(self, run: str, lineage: str | None) -> None:
        body = {"lineage": lineage}
        self._send("finish", {"run": run, **body}, "POST", f"/runs/{run}/finish", body, lambda _: {})

    def look(self, id: str) -> None:
        self._send("look", {"id": id}, "GET", f"/batches/{id}", None, _details)

    def _send(
        self,
        verb: str,
        request: dict[str, Any],
        method: str,
        path: str,
        body: Any,
        read: Callable[[httpx.Response], Any],
    ) -> tuple[int | None, dict[str, Any]]:
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        kind = wire.CONTENT_TYPE if isinstance(body, bytes) else "application/json"
        url = f"{self._chance.choice(self._urls)}/v1{path}"
        status, reply, begin = None, {}, time.monotonic()
        try:
            answer = self._http.request(method, url, content=content, headers={"Content-Type": kind})
            status, reply = answer.status_code, read(answer)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            time.sleep(0.02)
            return None, {}  # it was never sent
        except httpx.TransportError:
            pass
        self._history.record("call", verb=verb, begin=begin, end=time.monotonic(), status=status, **request, **reply)
        return status, reply

    def close(self) -> None:
        self._http.close()


def _digest(body: bytes) -> str:
    return wire.content_hash(body).hex()[:16]


def _state(answer: httpx.Response) -> dict[str, Any]:
    return {"state": answer.json()["state"]} if answer.is_success else {}


def _details(answer: httpx.Response) -> dict[str, Any]:
    return {"state": (reply := answer.json())["state"], "deliveries": reply["deliveries"]} if answer.is_success else {}


def _leased(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        return {}
    if answer.headers["Content-Type"] == wire.LEASES_CONTENT_TYPE:
        heads = wire.decode_leases(answer.content)
        leases = [(head.id, head.token, head.deliveries, _digest(body)) for head, body in heads]
    else:
        id, token, deliveries = (answer.headers[name] for name in ("Batch-Id", "Lease-Token", "Deliveries"))
        leases = [(id, token, int(deliveries), _digest(answer.content))]
    return {"leases": [dict(zip(("id", "token", "deliveries", "content"), lease, strict=True)) for lease in leases]}


def _outcomes(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        return {}
    return {"outcomes": [result["outcome"] for result in answer.json()["results"]]}
