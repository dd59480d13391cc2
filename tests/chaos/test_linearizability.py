"""The search finds orders where there are some, and the model refuses what the queue must never do."""

from typing import Any

import pytest

from tests.chaos.linear import judge
from tests.chaos.linearizability import violations
from tests.harness.history import Event

MAX_DELIVERIES = 2


class Clock:
    """Gives each call a begin and an end: one after the other, a second each and a second apart."""

    def __init__(self) -> None:
        self.now = 0.0

    def call(
        self, verb: str, status: int | None, *, at: float | None = None, lasts: float = 1.0, **fields: Any
    ) -> Event:
        """at: the begin; now by default. status: None for a call without an answer."""
        begin = self.now if at is None else at
        self.now = max(self.now, begin + lasts + 1)
        return {"kind": "call", "verb": verb, "begin": begin, "end": begin + lasts, "status": status, **fields}

    def upload(self, id: str = "a", status: int | None = 201, state: str = "ready", **fields: Any) -> Event:
        request: dict[str, Any] = {"id": id, "run": "run", "lineage": None, "content": "c", **fields}
        reply: dict[str, Any] = {"state": state} if status in (200, 201) else {}
        return self.call("upload", status, **request, **reply)

    def lease(self, id: str | None = "a", token: str = "t", status: int | None = 200, **fields: Any) -> Event:
        whose: dict[str, Any] = dict.fromkeys(("incarnation", "request_id", "run", "lineage")) | {"consumer": "me"}
        content, deliveries = fields.pop("content", "c"), fields.pop("deliveries", 1)
        ids = id.split() if id and status == 200 else []
        reply = [{"id": each, "token": token, "deliveries": deliveries, "content": content} for each in ids]
        return self.call("lease", status, **{**whose, "seconds": 100.0, "leases": reply, **fields})

    def settle(self, verb: str, outcome: str | None, token: str = "t", id: str = "a", **fields: Any) -> Event:
        request: dict[str, Any] = {"keys": [(id, token)], "seconds": 100.0, "started": False, "error": False, **fields}
        reply: dict[str, Any] = {"outcomes": [outcome]} if outcome else {}
        return self.call(verb, 200 if outcome else None, **request, **reply)

    def ack(self, outcome: str | None = "ok", token: str = "t", **fields: Any) -> Event:
        return self.settle("ack", outcome, token, **fields)

    def look(self, state: str | None, deliveries: int = 0, id: str = "a") -> Event:
        reply: dict[str, Any] = {"state": state, "deliveries": deliveries} if state else {}
        return self.call("look", 200 if state else 404, id=id, **reply)

    def requeue(self, status: int) -> Event:
        reply: dict[str, Any] = {"state": "ready"} if status == 200 else {}
        return self.call("requeue", status, id="a", **reply)

    def drop(self, status: int | None = 204) -> Event:
        return self.call("drop", status, id="a")


c = Clock()

GOOD: dict[str, list[Event]] = {
    "a life": [c.upload(), c.lease(), c.settle("extend", "ok"), c.ack(), c.ack("already"), c.look("done"), c.drop()],
    "a lost answer to an upload": [c.upload(status=None), c.upload(status=200), c.lease()],
    "a lost answer to an ack": [c.upload(), c.lease(), c.ack(None), c.ack("already")],
    "a lost answer to a lease": [
        c.upload(), c.lease(status=None, request_id="r"), c.look("leased"), c.lease(request_id="r"), c.ack(),
    ],
    "a lease that ran out": [
        c.upload(), c.lease(seconds=5.0), c.lease(token="u", at=c.now + 5), c.ack("stale"), c.ack("ok", "u"),
    ],
    "a release": [
        c.upload(), c.lease(), c.settle("release", "ok"), c.settle("release", "already"), c.ack("stale"),
        c.lease(token="u"), c.settle("release", "already"), c.ack("ok", "u"),
    ],
    "errors": [
        c.upload(), c.lease(), c.settle("release", "ok", error=True), c.lease(token="u", deliveries=2),
        c.settle("release", "ok", "u", error=True), c.look("dead", 2), c.requeue(200), c.look("ready"),
    ],
    "another lineage": [
        c.upload(lineage="one"), c.lease(None, status=204, run="run", lineage="two"), c.look("expired"), c.requeue(200),
        c.upload("b", state="expired", lineage="one"),
    ],
}  # fmt: skip

BAD: dict[str, list[Event]] = {
    "one lease in two hands": [c.upload(), c.lease(), c.settle("release", "ok"), c.lease()],
    "an ack undone": [c.upload(), c.lease(), c.ack(), c.look("ready")],
    "two acks": [c.upload(), c.lease(), c.ack(), c.ack("ok")],
    "a lease ended too early": [c.upload(), c.lease(), c.ack("stale")],
    "leased with other content": [c.upload(), c.lease(content="other")],
    "an admitted batch lost": [c.upload(), c.look(None)],
    "a dropped one leased": [c.upload(), c.drop(), c.lease()],
    "a dead one leased": [
        c.upload(), c.lease(), c.settle("release", "ok", error=True), c.lease(token="u", deliveries=2),
        c.settle("release", "ok", "u", error=True), c.lease(token="v", deliveries=3),
    ],
    "a delivery not counted": [c.upload(), c.lease(), c.settle("release", "ok", error=True), c.lease(token="u")],
    "leased by nobody": [c.upload(), c.look("leased")],
    "a lost ack seen done, then not": [c.upload(), c.lease(), c.ack(None), c.look("done"), c.look("leased")],
}  # fmt: skip


@pytest.mark.parametrize(("history", "wrong"), [*((h, 0) for h in GOOD.values()), *((h, 1) for h in BAD.values())])
def test_a_wrong_history_is_refused_and_a_right_one_accepted(history: list[Event], wrong: int) -> None:
    assert len(violations(history, MAX_DELIVERIES)) == wrong


def test_what_does_not_follow_is_explained_and_a_bug_of_the_server_is_a_fault() -> None:
    explanations = violations(BAD["an ack undone"], MAX_DELIVERIES)
    assert [line.split()[0] for line in explanations["a"]] == ["then", "then", "then", "but"]
    assert judge(BAD["an ack undone"], explanations).faults == [f"a: {explanations['a'][-1]}"]
    assert judge([*GOOD["a life"], c.lease(status=500)], {}).faults
