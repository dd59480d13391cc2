"""The client against a server on a socket that is down, full, forgetful, or right to refuse."""

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from uuid6 import uuid7

from shared import wire
from shared.api import Lease, LeaseBody, ModelInfo, Order
from shared.batch import RolloutBatch, ScoredBatch, TokenGroup
from shared.client import Leased, NotRefServer, RefServerError, Unreachable, UnusableBatch
from shared.client.errors import retry_after
from tests.ports import free_port

OpenSite = Callable[..., Any]
Connect = Callable[..., Any]
TERMS = LeaseBody(
    consumer="trainer",
    incarnation="life",
    run="run",
    epoch=1,
    policy_version=7,
    max_lag=4,
    order=Order.FRESHEST,
    wait_seconds=2,
    lease_seconds=30,
)
MODEL = dict.fromkeys(ModelInfo.model_fields) | {"name": "m", "max_batch_tokens": 1000}


class Waits:
    """Notes each wait. Ends the so-manieth, if told to."""

    class Enough(Exception):
        pass

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.seconds: list[float] = []
        self.patience = 10_000

    def __call__(self, reason: str, seconds: float) -> None:
        self.reasons.append(reason)
        self.seconds.append(seconds)
        if len(self.reasons) >= self.patience:
            raise self.Enough


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def patient(connect: Connect, waits: Waits) -> Connect:
    """Opens a client that never gives up by itself, and says why it waits."""
    return lambda url: connect(url, patience=None, on_wait=waits)


def scored_batch(version: int = 0) -> ScoredBatch:
    rollout = RolloutBatch(
        id=str(uuid7()),
        run="run",
        epoch=0,
        policy_version=version,
        temperature=1.0,
        group=TokenGroup(np.array([3]), np.array([4, 5, 6]), np.array([1, 2])),
        rewards=np.array([0, 1], np.float32),
        finished=np.ones(2, np.bool_),
    )
    return ScoredBatch(rollout, -np.ones(3, np.float32), "0")


def answer(site: type, status: int = 200, value: Any = None, **headers: str) -> Any:
    body = value if isinstance(value, bytes) else json.dumps({} if value is None else value).encode()
    return site(status, body, {name.replace("_", "-"): text for name, text in headers.items()})


def error(message: str, field: str | None = None) -> dict[str, Any]:
    return {"error": {"code": "x", "message": message, "field": field, "request_id": "r"}}


@pytest.fixture
def script(open_site: OpenSite) -> Callable[..., Any]:
    """A site that gives these answers one after the other, and the last one from then on."""

    def make(*answers: Any) -> Any:
        left = list(answers)
        return open_site(lambda request: left.pop(0) if len(left) > 1 else left[0])

    return make


@pytest.fixture
def reply(open_site: OpenSite) -> Callable[..., Any]:
    """Builds answers."""
    site = open_site(lambda request: None)
    return lambda *args, **kwargs: answer(site.answer, *args, **kwargs)


@pytest.mark.usefixtures("no_backoff")
class TestOutages:
    @pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 507])
    def test_an_overload_or_a_failure_is_waited_out(
        self, script: Any, reply: Any, patient: Connect, waits: Waits, status: int
    ) -> None:
        full = reply(status, error("the queue is full"), Retry_After="1")
        site = script(full, full, reply(200, MODEL))
        client = patient(site.url)
        assert client.model().name == "m"
        assert len(site.requests) == 3
        assert (
            waits.reasons
            == [f"the reference server at {site.url} says: the reference server answered {status}: the queue is full"]
            * 2
        )
        assert waits.seconds == sorted(waits.seconds)

    def test_an_answer_that_is_no_json(self, script: Any, reply: Any, patient: Connect, waits: Waits) -> None:
        site = script(reply(502, b"<html>bad gateway</html>"), reply(200, MODEL))
        assert patient(site.url).model().name == "m"
        assert waits.reasons[0].endswith("the answer was 502 Bad Gateway")  # without the page

    @pytest.mark.parametrize("wish", ["0", "", "soon", "-1", "1.5", "Wed, 21 Oct 2015 07:28:00 GMT"])
    def test_any_wish_to_be_asked_later_leads_to_another_request(
        self, script: Any, reply: Any, patient: Connect, wish: str
    ) -> None:
        site = script(reply(503, error("starting"), Retry_After=wish), reply(200, MODEL))
        assert patient(site.url).model().name == "m"

    def test_a_lost_answer_is_asked_for_again(self, script: Any, reply: Any, patient: Connect, waits: Waits) -> None:
        site = script(None, None, reply(201, {"id": "i", "state": "queued"}))
        patient(site.url).upload(b"the body")
        assert [request.body for request in site.requests] == [b"the body"] * 3
        assert all(request.headers["content-type"] == wire.CONTENT_TYPE for request in site.requests)
        assert all("does not answer" in reason for reason in waits.reasons) and len(waits.reasons) == 2

    def test_on_wait_may_end_the_wait(self, script: Any, reply: Any, patient: Connect, waits: Waits) -> None:
        waits.patience = 3
        site = script(reply(429, error("full")))
        with pytest.raises(Waits.Enough):
            patient(site.url).upload(b"")
        assert len(site.requests) == 3

    def test_on_wait_may_end_the_wait_for_a_server_that_is_not_there(self, patient: Connect, waits: Waits) -> None:
        waits.patience = 2
        with pytest.raises(Waits.Enough):
            patient(f"http://127.0.0.1:{free_port()}").model()


@pytest.mark.usefixtures("no_backoff")
def test_a_server_that_is_not_up_yet(open_site: OpenSite, reply: Any, connect: Connect) -> None:
    """It starts while the client waits for it."""
    port, reasons = free_port(), []

    def on_wait(reason: str, seconds: float) -> None:
        reasons.append(reason)
        if len(reasons) == 3:
            open_site(lambda request: reply(200, MODEL), port)

    assert connect(f"http://127.0.0.1:{port}", patience=None, on_wait=on_wait).model().name == "m"
    assert len(reasons) == 3 and all("does not answer" in reason for reason in reasons)


def test_retry_after_is_honoured(open_site: OpenSite, reply: Any, patient: Connect) -> None:
    times: list[float] = []

    def respond(request: Any) -> Any:
        times.append(time.monotonic())
        return reply(429, error("full"), Retry_After="1") if len(times) == 1 else reply(200, MODEL)

    patient(open_site(respond).url).model()
    assert 1 <= times[1] - times[0] < 10


class TestRefusals:
    @pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 415, 422])
    def test_are_raised_at_once(self, script: Any, reply: Any, patient: Connect, waits: Waits, status: int) -> None:
        site = script(reply(status, error("rewards must not be infinite", "rewards")))
        with pytest.raises(RefServerError, match="rewards must not be infinite") as refused:
            patient(site.url).upload(b"")
        assert (refused.value.status, refused.value.field) == (status, "rewards")
        assert len(site.requests) == 1 and not waits.reasons

    @pytest.mark.parametrize("body", [b"", b"nope", b"[]", b"5", b'{"error": "nope"}', b'{"error": {}}'])
    def test_in_any_form(self, script: Any, reply: Any, patient: Connect, body: bytes) -> None:
        with pytest.raises(RefServerError) as refused:
            patient(script(reply(400, body)).url).model()
        assert (refused.value.status, refused.value.field) == (400, None)

    @pytest.mark.parametrize("status", [301, 404, 405])
    def test_that_only_another_server_gives(self, script: Any, reply: Any, patient: Connect, status: int) -> None:
        with pytest.raises(NotRefServer, match=f"is not a reference server: it says {status} .*: nope$"):
            patient(script(reply(status, b"nope")).url).model()

    @pytest.mark.parametrize("url", ["127.0.0.1:8400", "ftp://127.0.0.1", "localhost"])
    def test_a_url_that_never_works_is_not_waited_for(self, patient: Connect, waits: Waits, url: str) -> None:
        with pytest.raises(Unreachable, match="a URL begins with"):
            patient(url).model()
        assert not waits.reasons


class TestLease:
    def leased(self, reply: Any, batch: RolloutBatch | ScoredBatch, deliveries: int = 1) -> Any:
        headers = {"Batch_Id": "an-id", "Lease_Token": "a-token", "Lease_Seconds": "30", "Deliveries": str(deliveries)}
        return reply(200, wire.encode(batch), **headers)

    def test_what_is_asked(self, script: Any, reply: Any, patient: Connect) -> None:
        site = script(self.leased(reply, scored_batch()))
        patient(site.url).lease(TERMS)
        (request,) = site.requests
        asked = json.loads(request.body)
        assert (request.method, request.path) == ("POST", "/v1/batches/lease")
        assert request.headers["content-type"] == "application/json"
        assert asked.pop("request_id")
        assert asked == {
            "consumer": "trainer",
            "incarnation": "life",
            "run": "run",
            "epoch": 1,
            "policy_version": 7,
            "max_lag": 4,
            "order": "freshest",
            "wait_seconds": 2,
            "lease_seconds": 30,
        }, "what is None is not sent"

    @pytest.mark.parametrize("scored", [True, False])
    def test_what_comes(self, script: Any, reply: Any, patient: Connect, scored: bool) -> None:
        batch = scored_batch(version=3)
        sent = batch if scored else batch.rollout
        leased = patient(script(self.leased(reply, sent, 2)).url).lease(TERMS)
        assert isinstance(leased.batch, ScoredBatch if scored else RolloutBatch)
        assert (leased.id, leased.token, leased.deliveries) == ("an-id", "a-token", 2)
        assert leased.rollout.policy_version == 3
        assert leased.rollout.group.completion_ids.tolist() == [4, 5, 6]

    def test_nothing_within_the_time(self, script: Any, reply: Any, patient: Connect) -> None:
        assert patient(script(reply(204, b"")).url).lease(TERMS) is None

    @pytest.mark.usefixtures("no_backoff")
    def test_a_lost_answer_repeats_the_request_id(self, script: Any, reply: Any, patient: Connect) -> None:
        batch = self.leased(reply, scored_batch())
        site = script(None, reply(503, error("restarting")), batch)
        client = patient(site.url)
        assert client.lease(TERMS)
        assert client.lease(TERMS)
        ids = [json.loads(request.body)["request_id"] for request in site.requests]
        assert ids[0] == ids[1] == ids[2] != ids[3]
        assert site.requests[0].body == site.requests[2].body


class TestLeaseMany:
    """One request for several batches."""

    TERMS = TERMS.model_copy(update={"count": 5})

    def leased(self, reply: Any, *batches: RolloutBatch | ScoredBatch) -> Any:
        bodies = [wire.encode(batch) for batch in batches]
        heads = (
            Lease(id=f"id-{i}", token=f"token-{i}", lease_seconds=30, deliveries=1 + i, bytes=len(body))
            for i, body in enumerate(bodies)
        )
        body = b"".join(wire.encode_leases(zip(heads, bodies, strict=True)))
        return reply(200, body, **{"Content_Type": wire.LEASES_CONTENT_TYPE})

    def test_what_is_asked_and_what_comes(self, script: Any, reply: Any, patient: Connect) -> None:
        site = script(self.leased(reply, scored_batch(version=3), scored_batch(version=4).rollout))
        first, second = patient(site.url).lease_many(self.TERMS)
        assert json.loads(site.requests[0].body)["count"] == 5
        assert isinstance(first.batch, ScoredBatch) and isinstance(second.batch, RolloutBatch)
        assert [(each.id, each.token, each.deliveries) for each in (first, second)] == [
            ("id-0", "token-0", 1),
            ("id-1", "token-1", 2),
        ]
        assert [each.rollout.policy_version for each in (first, second)] == [3, 4]

    def test_nothing_within_the_time(self, script: Any, reply: Any, patient: Connect) -> None:
        assert patient(script(reply(204, b"")).url).lease_many(self.TERMS) == []

    def test_one_that_cannot_be_used_stands_among_the_others(self, script: Any, reply: Any, patient: Connect) -> None:
        bad, good = scored_batch(), scored_batch()
        object.__setattr__(bad.rollout, "temperature", 1e-300)
        unusable, leased = patient(script(self.leased(reply, bad, good)).url).lease_many(self.TERMS)
        assert isinstance(unusable, UnusableBatch) and isinstance(leased, Leased)
        assert (unusable.id, unusable.token, unusable.field) == ("id-0", "token-0", "temperature")

    @pytest.mark.usefixtures("no_backoff")
    def test_a_lost_answer_repeats_the_request_id(self, script: Any, reply: Any, patient: Connect) -> None:
        site = script(None, self.leased(reply, scored_batch()))
        assert patient(site.url).lease_many(self.TERMS)
        assert site.requests[0].body == site.requests[1].body

    @pytest.mark.parametrize("cut", [1, 10])
    def test_an_answer_that_does_not_add_up(self, script: Any, reply: Any, patient: Connect, cut: int) -> None:
        whole = self.leased(reply, scored_batch())
        with pytest.raises(NotRefServer, match="not a reference server of this version"):
            patient(script(reply(200, whole.body[:-cut])).url).lease_many(self.TERMS)

    def test_terms_of_several_are_not_for_one(self, patient: Connect, script: Any) -> None:
        with pytest.raises(ValueError, match="lease_many"):
            patient(script().url).lease(self.TERMS)


class TestSettling:
    @pytest.fixture
    def leases(self) -> list[Leased]:
        batch = scored_batch()
        return [Leased(batch, "a", "token-a", 1), Leased(batch, "b", "token-b", 1)]

    @pytest.mark.parametrize(
        ("verb", "call", "extra"),
        [
            ("ack", lambda client, leases: client.ack(leases, "step-8"), {"checkpoint": "step-8"}),
            ("extend", lambda client, leases: client.extend(leases, 30), {"lease_seconds": 30, "started": False}),
            (
                "extend",
                lambda client, leases: client.extend(leases, 30, started=True),
                {"lease_seconds": 30, "started": True},
            ),
            ("release", lambda client, leases: client.release(leases), {}),
            ("release", lambda client, leases: client.release(leases, error="bad"), {"error": "bad"}),
        ],
    )
    def test_sends_keys_and_returns_outcomes(
        self,
        script: Any,
        reply: Any,
        patient: Connect,
        leases: list[Leased],
        verb: str,
        call: Any,
        extra: dict[str, Any],
    ) -> None:
        results = {"results": [{"id": "a", "outcome": "ok"}, {"id": "b", "outcome": "stale"}]}
        site = script(reply(200, results))
        assert call(patient(site.url), leases) == {"a": "ok", "b": "stale"}
        (request,) = site.requests
        assert request.path == f"/v1/leases/{verb}"
        keys = [{"id": "a", "token": "token-a"}, {"id": "b", "token": "token-b"}]
        assert json.loads(request.body) == {"leases": keys, **extra}

    def test_of_nothing_asks_nobody(self, script: Any, reply: Any, patient: Connect) -> None:
        site = script(reply(500))
        client = patient(site.url)
        assert client.ack([], "x") == client.extend([], 30) == client.release([]) == {}
        assert not site.requests


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_server_on_this_machine_is_asked_without_a_proxy(
    script: Any, reply: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    proxy, server = script(reply(503, error("a proxy"))), script(reply(200, MODEL))
    for scheme in ("http", "all"):
        monkeypatch.setenv(f"{scheme}_proxy", proxy.url)
    client = connect(server.url.replace("127.0.0.1", name), token="only-for-the-server", patience=0)
    assert client.model().name == "m"
    assert proxy.requests == []


def test_a_server_elsewhere_is_asked_through_a_proxy(
    script: Any, reply: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = script(reply(200, MODEL))
    monkeypatch.setenv("http_proxy", proxy.url)
    assert connect("http://gpu-box.example:8400", patience=0).model().name == "m"
    assert [request.path for request in proxy.requests] == ["http://gpu-box.example:8400/v1/model"]


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("9" * 400, 3600.0), ("soon", None), ("-1", None)])
def test_no_server_makes_a_client_sleep_without_end(header: str, seconds: float | None) -> None:
    assert retry_after(httpx.Response(429, headers={"Retry-After": header})) == seconds
