"""Requests of the client to a server on a socket that is down, full, forgetful, another server, or right to refuse."""

import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from uuid6 import uuid7

from shared import wire
from shared.api import Lease, LeaseBody, ModelInfo, Order, Uploaded
from shared.batch import Batch, TokenGroup
from shared.client import Leased, NotRefServer, RefServerClient, RefServerError, Unreachable, UnusableBatch
from shared.client.errors import retry_after
from tests.harness.ports import free_port
from tests.site import Answer, Request

OpenSite = Callable[..., Any]
Connect = Callable[..., Any]
Script = Callable[..., Any]

ID = "01890a5d-ac96-774b-bcce-b302099a8057"
MODEL = dict.fromkeys(ModelInfo.model_fields) | {"name": "m", "max_batch_tokens": 1000, "max_image_bytes": 0}
SECRET = "a-token-that-nobody-may-see"
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


def reply(status: int, value: Any = None, **headers: str) -> Answer:
    body = value if isinstance(value, bytes) else json.dumps({} if value is None else value).encode()
    return Answer(status, body, {name.replace("_", "-"): text for name, text in headers.items()})


def problem(status: int, message: str = "no", field: str | None = None, **headers: str) -> Answer:
    error = {"code": "x", "message": message, "field": field, "request_id": "r7"}
    return reply(status, {"error": error}, **headers)


def nowhere() -> str:
    """A URL at which nothing listens."""
    return f"http://127.0.0.1:{free_port()}"


class Waits:
    """Records each wait. `patience` ends the wait of that number."""

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
    """Opens a client that never gives up by itself, and records why it waits."""
    return lambda url: connect(url, patience=None, on_wait=waits)


@pytest.fixture
def script(open_site: OpenSite) -> Script:
    """A site that gives these answers one after the other, and the last one from then on."""

    def make(*answers: Answer | None) -> Any:
        left = list(answers)
        return open_site(lambda request: left.pop(0) if len(left) > 1 else left[0])

    return make


def scored_batch(version: int = 0) -> Batch:
    rollout = Batch(
        id=str(uuid7()),
        run="run",
        epoch=0,
        policy_version=version,
        temperature=1.0,
        group=TokenGroup(np.array([3]), np.array([4, 5, 6]), np.array([1, 2])),
        rewards=np.array([0, 1], np.float32),
        finished=np.ones(2, np.bool_),
    )
    return replace(rollout, ref_logps=-np.ones(3, np.float32), reference_version="0")


@pytest.mark.usefixtures("no_backoff")
class TestOutages:
    @pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 507])
    def test_are_waited_out(self, script: Script, patient: Connect, waits: Waits, status: int) -> None:
        full = problem(status, "the queue is full", Retry_After="1")
        site = script(full, full, reply(200, MODEL))
        assert patient(site.url).model().name == "m"
        assert len(site.requests) == 3
        reason = f"the reference server at {site.url} says: the reference server answered {status}: the queue is full"
        assert waits.reasons == [reason] * 2
        assert waits.seconds == sorted(waits.seconds)

    def test_the_page_of_a_gateway_is_left_out(self, script: Script, patient: Connect, waits: Waits) -> None:
        site = script(reply(502, b"<html>bad gateway</html>"), reply(200, MODEL))
        assert patient(site.url).model().name == "m"
        assert waits.reasons[0].endswith("the answer was 502 Bad Gateway")

    def test_an_upload_whose_answer_is_lost_is_repeated(self, script: Script, patient: Connect, waits: Waits) -> None:
        site = script(None, None, reply(201, {"id": "i", "state": "queued"}))
        patient(site.url).upload(b"the body")
        assert [request.body for request in site.requests] == [b"the body"] * 3
        assert all(request.headers["content-type"] == wire.CONTENT_TYPE for request in site.requests)
        assert all("does not answer" in reason for reason in waits.reasons) and len(waits.reasons) == 2

    def test_on_wait_may_end_the_wait(self, script: Script, patient: Connect, waits: Waits) -> None:
        waits.patience = 3
        site = script(problem(429))
        with pytest.raises(Waits.Enough):
            patient(site.url).upload(b"")
        assert len(site.requests) == 3
        with pytest.raises(Waits.Enough):
            patient(nowhere()).model()


def test_retry_after_is_honoured(open_site: OpenSite, patient: Connect) -> None:
    times: list[float] = []

    def respond(request: Any) -> Any:
        times.append(time.monotonic())
        return problem(429, Retry_After="1") if len(times) == 1 else reply(200, MODEL)

    patient(open_site(respond).url).model()
    assert 1 <= times[1] - times[0] < 10


class TestPatience:
    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_of_zero_tries_once(self, connect: Connect, script: Script, waits: Waits, status: int) -> None:
        site = script(problem(status, Retry_After="0"))
        with pytest.raises(RefServerError) as refused:
            connect(site.url, patience=0, on_wait=waits).model()
        assert (refused.value.status, len(site.requests), waits.reasons) == (status, 1, [])
        url = nowhere()
        with pytest.raises(Unreachable, match=f"no server answers at {re.escape(url)}") as silent:
            connect(url, patience=0).model()
        assert silent.value.passes and not silent.value.done

    @pytest.mark.usefixtures("no_backoff")
    def test_ends(self, connect: Connect, script: Script, waits: Waits) -> None:
        site = script(problem(503))
        with pytest.raises(RefServerError):
            connect(site.url, patience=0.2, on_wait=waits).model()
        assert len(site.requests) == len(waits.seconds) + 1 > 1
        assert max(waits.seconds) < 0.2

    def test_ends_at_once_if_the_server_asks_for_more(self, connect: Connect, script: Script) -> None:
        site = script(problem(429, Retry_After="3600"))
        with pytest.raises(RefServerError) as refused:
            connect(site.url, patience=60).model()
        assert (len(site.requests), refused.value.retry_after) == (1, 3600)

    def test_a_glance_and_a_readiness_check_try_once(self, connect: Connect, script: Script) -> None:
        site = script(problem(503, "the model is loading"))
        client = connect(site.url, patience=None)
        assert client.glance() is None and client.not_ready_reason() == "the model is loading"
        assert len(site.requests) == 2
        absent = connect(nowhere(), patience=None)
        assert absent.glance() is None and "no server answers" in absent.not_ready_reason()
        assert connect(script(Answer(200, b"ok")).url).not_ready_reason() is None


@pytest.mark.usefixtures("no_backoff")
class TestRequeue:
    """The only request that is not idempotent."""

    @pytest.mark.parametrize("status", [None, 500, 502, 504])
    def test_is_not_repeated_if_it_may_have_been_done(
        self, connect: Connect, script: Script, status: int | None
    ) -> None:
        site = script(problem(status) if status else None)
        with pytest.raises(RefServerError if status else Unreachable) as broken:
            connect(site.url, patience=1).requeue(ID)
        assert len(site.requests) == 1 and (status or broken.value.done)  # type: ignore[union-attr]

    @pytest.mark.parametrize("status", [429, 503])
    def test_is_repeated_if_it_was_not_done(self, connect: Connect, script: Script, status: int) -> None:
        site = script(problem(status), reply(200, {"id": ID, "state": "ready"}))
        assert connect(site.url, patience=None).requeue(ID).state == "ready"
        sent = [(request.method, request.path) for request in site.requests]
        assert sent == [("POST", f"/v1/batches/{ID}/requeue")] * 2

    def test_a_drop_is_repeated(self, connect: Connect, script: Script) -> None:
        site = script(None, Answer(204))
        connect(site.url, patience=None).drop("a/b")
        assert [request.path for request in site.requests] == ["/v1/batches/a%2Fb"] * 2


class TestRefusals:
    @pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 415, 422])
    def test_are_raised_at_once(self, script: Script, patient: Connect, waits: Waits, status: int) -> None:
        site = script(problem(status, "rewards must not be infinite", "rewards"))
        with pytest.raises(RefServerError, match="rewards must not be infinite") as refused:
            patient(site.url).upload(b"")
        assert (refused.value.status, refused.value.field, refused.value.request_id) == (status, "rewards", "r7")
        assert len(site.requests) == 1 and not waits.reasons

    @pytest.mark.parametrize("body", [b"", b"nope", b"[]", b"5", b'{"error": "nope"}', b'{"error": {}}'])
    def test_in_any_form(self, script: Script, patient: Connect, body: bytes) -> None:
        with pytest.raises(RefServerError, match=r"^the answer was 400 ") as refused:
            patient(script(reply(400, body)).url).model()
        about = refused.value
        assert (about.status, about.code, about.field, about.request_id) == (400, None, None, None)

    @pytest.mark.parametrize("status", [301, 404, 405])
    def test_that_only_another_server_gives(self, script: Script, patient: Connect, status: int) -> None:
        with pytest.raises(NotRefServer, match=f"is not a reference server: it says {status} .*: nope$"):
            patient(script(reply(status, b"nope")).url).model()

    @pytest.mark.parametrize("body", [b"<html>hello</html>", b"[]", b'{"name": 7}', b"\xff"])
    def test_an_answer_of_another_api(self, script: Script, patient: Connect, body: bytes) -> None:
        site = script(Answer(200, body))
        with pytest.raises(NotRefServer, match=re.escape(site.url)):
            patient(site.url).model()
        with pytest.raises(NotRefServer):
            patient(site.url).lease(TERMS)
        assert len(site.requests) == 2

    @pytest.mark.parametrize("url", ["127.0.0.1:8400", "ftp://127.0.0.1", "localhost"])
    def test_a_url_that_never_works_is_not_waited_for(self, patient: Connect, waits: Waits, url: str) -> None:
        with pytest.raises(Unreachable, match="a URL begins with"):
            patient(url).model()
        assert not waits.reasons


class TestLease:
    def leased(self, batch: Batch, deliveries: int = 1) -> Answer:
        headers = {"Batch_Id": "an-id", "Lease_Token": "a-token", "Lease_Seconds": "30", "Deliveries": str(deliveries)}
        return reply(200, wire.encode(batch), **headers)

    @pytest.mark.parametrize("scored", [True, False])
    def test_request_and_answer(self, script: Script, patient: Connect, scored: bool) -> None:
        batch = scored_batch(version=3)
        site = script(self.leased(batch if scored else batch.without_scores(), 2))
        leased = patient(site.url).lease(TERMS)
        assert (leased.batch.ref_logps is not None) == scored
        assert (leased.id, leased.token, leased.deliveries) == ("an-id", "a-token", 2)
        assert leased.batch.policy_version == 3
        (request,) = site.requests
        assert (request.method, request.path) == ("POST", "/v1/batches/lease")
        assert request.headers["content-type"] == "application/json"
        sent = json.loads(request.body)
        assert sent.pop("request_id")
        assert sent == TERMS.model_dump(mode="json", exclude_none=True), "what is None is not sent"

    @pytest.mark.usefixtures("no_backoff")
    def test_a_lost_answer_repeats_the_request_id(self, script: Script, patient: Connect) -> None:
        site = script(None, problem(503), self.leased(scored_batch()))
        client = patient(site.url)
        assert client.lease(TERMS)
        assert client.lease(TERMS)
        ids = [json.loads(request.body)["request_id"] for request in site.requests]
        assert ids[0] == ids[1] == ids[2] != ids[3]
        assert site.requests[0].body == site.requests[2].body

    def test_of_nothing(self, script: Script, patient: Connect) -> None:
        client = patient(script(reply(204, b"")).url)
        assert client.lease(TERMS) is None
        assert client.lease_many(TestLeaseMany.TERMS) == []


def test_what_is_refused_of_several_is_uploaded_again(script: Script, patient: Connect) -> None:
    """By itself, so that it waits for room, or its own error is returned."""
    admitted = {"id": "a", "state": "queued", "created": True}
    error = {"code": "queue_full", "message": "no", "request_id": "r7"}
    together = reply(200, {"results": [{"error": error}, {"uploaded": admitted}, {"error": error}]})
    site = script(together, problem(422), reply(201, admitted))
    first, second, third = patient(site.url).upload_several([b"1", b"2", b"3"])
    assert isinstance(first, RefServerError) and first.status == 422
    assert isinstance(second, Uploaded) and isinstance(third, Uploaded)
    assert [request.body for request in site.requests[1:]] == [b"1", b"3"]


def test_results_that_are_too_few(script: Script, patient: Connect) -> None:
    with pytest.raises(NotRefServer, match="0 results of 2 batches"):
        patient(script(reply(200, {"results": []})).url).upload_several([b"1", b"2"])


class TestLeaseMany:
    TERMS = TERMS.model_copy(update={"count": 5})

    def leased(self, *batches: Batch) -> Answer:
        bodies = [wire.encode(batch) for batch in batches]
        heads = (
            Lease(id=f"id-{i}", token=f"token-{i}", lease_seconds=30, deliveries=1 + i, bytes=len(body))
            for i, body in enumerate(bodies)
        )
        body = b"".join(wire.encode_leases(zip(heads, bodies, strict=True)))
        return reply(200, body, Content_Type=wire.LEASES_CONTENT_TYPE)

    def test_an_invalid_batch_is_in_the_list(self, script: Script, patient: Connect) -> None:
        bad, good = scored_batch(), scored_batch()
        object.__setattr__(bad, "temperature", 1e-300)
        unusable, leased = patient(script(self.leased(bad, good)).url).lease_many(self.TERMS)
        assert isinstance(unusable, UnusableBatch) and isinstance(leased, Leased)
        assert (unusable.id, unusable.token, unusable.field) == ("id-0", "token-0", "temperature")

    @pytest.mark.parametrize("cut", [1, 10])
    def test_an_answer_that_does_not_add_up(self, script: Script, patient: Connect, cut: int) -> None:
        whole = self.leased(scored_batch())
        with pytest.raises(NotRefServer, match="not a reference server of this version"):
            patient(script(reply(200, whole.body[:-cut])).url).lease_many(self.TERMS)

    def test_terms_of_several_are_not_for_one(self, patient: Connect, script: Script) -> None:
        with pytest.raises(ValueError, match="lease_many"):
            patient(script(None).url).lease(self.TERMS)


def test_lists_follow_the_cursor(connect: Connect, open_site: OpenSite) -> None:
    def page(request: Request) -> Answer:
        number = 1 + sum("cursor" in earlier.path for earlier in site.requests)
        summary = {"id": f"batch {number}", "run": "r", "state": "ready", "reason": None, "consumer": None}
        numbers = ("epoch", "policy_version", "admitted_at", "prompt_tokens", "completion_tokens", "completions")
        numbers += ("payload_bytes", "deliveries", "scoring_attempts")
        cursor = f"to/{number}?" if number < 3 else None
        return reply(200, {"batches": [summary | dict.fromkeys(numbers, 1)], "next_cursor": cursor})

    site = open_site(page)
    listed = connect(site.url).batches(state="ready", run="a b")
    assert [batch.id for batch in listed] == ["batch 1", "batch 2", "batch 3"]
    assert [request.path.partition("?")[2] for request in site.requests] == [
        f"state=ready&run=a+b&limit=1000{cursor}&order=oldest"
        for cursor in ("", "&cursor=to%2F1%3F", "&cursor=to%2F2%3F")
    ]


class TestToken:
    def test_is_sent_and_shown_nowhere(
        self, connect: Connect, script: Script, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        site = script(problem(401, "this token is not known here"), reply(200, MODEL))
        client = connect(site.url, token=SECRET)
        with pytest.raises(RefServerError) as refused:
            client.model()
        assert client.model().name == "m"
        assert [request.headers["authorization"] for request in site.requests] == [f"Bearer {SECRET}"] * 2
        assert SECRET not in f"{client!r} {refused.value!r} {refused.value} {caplog.text}"
        assert "GET" in caplog.text, "something was logged"
        connect(site.url).model()
        assert "authorization" not in site.requests[-1].headers

    @pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "schlüssel", "a#b"])
    def test_that_no_header_carries(self, token: str) -> None:
        with pytest.raises(ValueError, match=r"^token: ") as refused:
            RefServerClient("http://127.0.0.1:1", token=token)
        assert not token or token not in str(refused.value)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_server_on_this_machine_is_reached_without_a_proxy(
    script: Script, connect: Connect, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    proxy, server = script(problem(503)), script(reply(200, MODEL))
    for scheme in ("http", "all"):
        monkeypatch.setenv(f"{scheme}_proxy", proxy.url)
    client = connect(server.url.replace("127.0.0.1", name), token="only-for-the-server", patience=0)
    assert client.model().name == "m"
    assert proxy.requests == []


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("999999", 3600.0), ("soon", None), ("-1", None)])
def test_the_longest_retry_after_is_an_hour(header: str, seconds: float | None) -> None:
    assert retry_after(httpx.Response(503, headers={"Retry-After": header})) == seconds
