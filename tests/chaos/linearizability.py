"""One batch of the queue as a sequential machine: the states that a call may leave it in, with the reply.

It is the model of `tests/ref_server/queue/model.py`, cut down to one batch and without a clock: it only knows
the earliest moment at which time may end a lease.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

from tests.chaos.calls import BatchCalls, Call, by_batch
from tests.harness.history import Event

ABSENT, READY, LEASED, DONE, EXPIRED, DEAD = "absent", "ready", "leased", "done", "expired", "dead"

# Two processes read the same clock a little apart, and PostgreSQL reads another one.
_CLOCK_SLACK = 0.02
_OK, _ALREADY, _STALE, _UNKNOWN = "ok", "already", "stale", "unknown"


@dataclass(frozen=True)
class BatchState:
    """token, lease: of the lease, or of the one that settled the batch. over: tokens of leases that have ended.

    expires: the earliest moment at which time may end the lease. released: the last token that gave the batch back.
    payload: whether there is anything left to queue again.
    """

    state: str = ABSENT
    content: str = ""
    payload: bool = True
    deliveries: int = 0
    token: str = ""
    lease: tuple[str, str | None, str | None] = ("", None, None)
    expires: float = inf
    started: bool = False
    released: str = ""
    over: frozenset[str] = frozenset()


Answer = tuple[Any, ...]


class BatchModel:
    """useless_from, ghosts_from: see `BatchCalls`."""

    def __init__(self, max_deliveries: int, useless_from: float = inf, ghosts_from: float = inf) -> None:
        self._max_deliveries = max_deliveries
        self._useless_from = useless_from
        self._ghosts_from = ghosts_from
        self._verbs: dict[str, Callable[[BatchState, Call], tuple[Answer, BatchState]]] = {
            "upload": self._upload,
            "lease": self._lease,
            "ack": self._ack,
            "extend": self._extend,
            "release": self._release,
            "requeue": self._requeue,
            "drop": self._drop,
            "look": self._look,
            "takeover": self._take_over,
            "elsewhere": self._elsewhere,
        }

    def after(self, batch: BatchState, call: Call) -> Iterator[BatchState]:
        """The states in which the call may leave the batch; none if the reply is impossible."""
        for before in self._meanwhile(batch, call.end):
            reply, state = self._verbs[call.verb](before, call)
            for answer, changed in ((reply, state), *self._other_answers(reply, state, call)):
                if call.reply is None or call.reply == answer:
                    yield changed

    def _meanwhile(self, batch: BatchState, by: float) -> Iterator[BatchState]:
        """The states into which the batch may have changed by itself until then."""
        yield batch
        if batch.state == LEASED and batch.expires <= by:
            batch = self._lose(batch)
            yield batch
        if batch.state == READY and self._useless_from <= by:
            yield replace(batch, state=EXPIRED)

    def _other_answers(self, reply: Answer, state: BatchState, call: Call) -> Iterator[tuple[Answer, BatchState]]:
        """A ready batch may be leased by an unanswered request; one admitted for an ended or replaced run expires."""
        if reply[1:2] == (READY,) and self._ghosts_from <= call.end:
            yield (reply[0], LEASED, *reply[2:]), state
        if call.verb == "upload" and reply[0] == 201 and self._useless_from <= call.end:
            yield (201, EXPIRED), replace(state, state=EXPIRED, payload=False)

    def _upload(self, batch: BatchState, call: Call) -> tuple[Answer, BatchState]:
        if batch.state == ABSENT:
            return (201, READY), replace(batch, state=READY, content=call.content)
        if batch.content != call.content:
            return (409, None), batch
        return (200, batch.state), batch

    def _lease(self, batch: BatchState, call: Call) -> tuple[Answer, BatchState]:
        reply = (batch.deliveries + 1,) if call.content in ("", batch.content) else ("other content",)
        if batch.state == LEASED and batch.token == call.token:
            return reply, batch
        if batch.state != READY or call.token in batch.over:
            return ("nothing",), batch
        expires = call.begin + call.seconds - _CLOCK_SLACK
        return reply, replace(batch, state=LEASED, token=call.token, lease=call.lease, expires=expires, started=False)

    def _ack(self, batch: BatchState, call: Call) -> tuple[Answer, BatchState]:
        return self._settle(batch, call, lambda held: replace(held, state=DONE, payload=False))

    def _extend(self, batch: BatchState, call: Call) -> tuple[Answer, BatchState]:
        def prolong(held: BatchState) -> BatchState:
            expires = call.begin + call.seconds - _CLOCK_SLACK
            return replace(held, expires=expires, started=held.started or call.started)

        return self._settle(batch, call, prolong)

    def _release(self, batch: BatchState, call: Call) -> tuple[Answer, BatchState]:
        def give_back(held: BatchState) -> BatchState:
            return self._return(replace(held, released=held.token), counts=call.error)

        return self._settle(batch, call, give_back, _ALREADY if batch.released == call.token else _STALE)

    def _settle(
        self, batch: BatchState, call: Call, effect: Callable[[BatchState], BatchState], otherwise: str = _STALE
    ) -> tuple[Answer, BatchState]:
        if batch.state == ABSENT:
            return (_UNKNOWN,), batch
        if batch.token != call.token:
            return (otherwise,), batch
        return ((_ALREADY,), batch) if batch.state == DONE else ((_OK,), effect(batch))

    def _requeue(self, batch: BatchState, _: Call) -> tuple[Answer, BatchState]:
        if batch.state == ABSENT:
            return (404, None, None), batch
        if batch.state not in (EXPIRED, DEAD) or not batch.payload:
            return (409, None, None), batch
        return (200, READY, None), replace(batch, state=READY, deliveries=0)

    def _drop(self, batch: BatchState, _: Call) -> tuple[Answer, BatchState]:
        if batch.state == ABSENT:
            return (404, None, None), batch
        if batch.state == DONE:
            return (204, None, None), batch
        return (204, None, None), replace(self._ended(batch), state=EXPIRED, payload=False)

    def _look(self, batch: BatchState, _: Call) -> tuple[Answer, BatchState]:
        reply = (404, None, None) if batch.state == ABSENT else (200, batch.state, batch.deliveries)
        return reply, batch

    def _take_over(self, batch: BatchState, call: Call) -> tuple[Answer, BatchState]:
        consumer, incarnation, _ = call.lease
        if batch.state == LEASED and batch.lease[0] == consumer and batch.lease[1] != incarnation:
            return (), self._lose(batch)
        return (), batch

    def _elsewhere(self, batch: BatchState, call: Call) -> tuple[Answer, BatchState]:
        """A request that returned another batch, or none, does not hold this one."""
        consumer, _, request_id = call.lease
        holds = batch.state == LEASED and (batch.lease[0], batch.lease[2]) == (consumer, request_id)
        return ("holds",) if holds else (), batch

    def _lose(self, batch: BatchState) -> BatchState:
        return self._return(batch, counts=batch.started)

    def _return(self, batch: BatchState, *, counts: bool) -> BatchState:
        deliveries = batch.deliveries + counts
        dead = counts and deliveries >= self._max_deliveries
        return replace(self._ended(batch), state=DEAD if dead else READY, deliveries=deliveries)

    @staticmethod
    def _ended(batch: BatchState) -> BatchState:
        """Without its lease."""
        over = batch.over | {batch.token} if batch.token else batch.over
        return replace(batch, token="", lease=("", None, None), expires=inf, started=False, over=over)


S = TypeVar("S")


def violations(events: Iterable[Event], max_deliveries: int) -> dict[str, list[str]]:
    """For each batch whose calls have no valid order: the longest partial order, and the calls that do not fit."""
    explanations = {id: explain(batch, max_deliveries) for id, batch in by_batch(events).items()}
    return {id: lines for id, lines in explanations.items() if lines}


def explain(batch: BatchCalls, max_deliveries: int) -> list[str]:
    """Nothing if the calls have an order."""
    model = BatchModel(max_deliveries, batch.useless_from, batch.ghosts_from)
    calls = sorted(batch.calls, key=lambda call: call.begin)
    order = longest_order(calls, BatchState(), model.after)
    left = [call for place, call in enumerate(calls) if call.reply is not None and place not in order]
    return [*(f"then {calls[place]}" for place in order), *(f"but not {call}" for call in left)] if left else []


def longest_order(calls: Sequence[Call], start: S, after: Callable[[S, Call], Iterable[S]]) -> Sequence[int]:
    """Places of the answered calls and of some others, in an order that real time and the model allow, if there is one.

    Otherwise the beginning of one, as long as it gets. calls: by their begin. after: the states in which a call may
    leave a state, none if its reply is impossible there.
    """
    answered = sum(1 << place for place, call in enumerate(calls) if call.reply is not None)
    seen = {(0, start)}
    stack: list[tuple[int, S, tuple[int, ...]]] = [(0, start, ())]
    longest: tuple[int, ...] = ()
    while stack:
        done, state, order = stack.pop()
        if len(order) > len(longest) or not answered & ~done:
            longest = order
        if not answered & ~done:
            break
        steps = []
        for place in _next(calls, done):
            for changed in after(state, calls[place]):
                useless = changed == state and calls[place].reply is None
                if not useless and (node := (done | 1 << place, changed)) not in seen:
                    seen.add(node)
                    steps.append((*node, (*order, place)))
        stack += reversed(steps)  # the earliest first
    return longest


def _next(calls: Sequence[Call], done: int) -> list[int]:
    """The calls that may come next: those that began before each of the others had ended."""
    left = [place for place in range(len(calls)) if not done >> place & 1]
    first_end = min(calls[place].end for place in left)
    return [place for place in left if calls[place].begin <= first_end]
