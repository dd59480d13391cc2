"""How long a client goes on, what it never repeats, and what it says of a server that cannot be used."""

import inspect
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from shared.api import LeaseBody, ModelInfo
from shared.client import (
    NotRefServer,
    RefServerClient,
    RefServerError,
    Unreachable,
)
from tests.site import Answer, Request

Connect = Callable[..., Any]
OpenSite = Callable[..., Any]

ID = "01890a5d-ac96-774b-bcce-b302099a8057"
MODEL = dict.fromkeys(ModelInfo.model_fields) | {"name": "m", "max_batch_tokens": 1000}
SECRET = "a-token-that-nobody-may-see"


def respond(status: int, value: Any = None, **headers: str) -> Answer:
    return Answer(status, json.dumps(value).encode(), {name.replace("_", "-"): text for name, text in headers.items()})


def problem(status: int, code: str, message: str = "no", **headers: str) -> Answer:
    return respond(status, {"error": {"code": code, "message": message, "request_id": "r7"}}, **headers)


def nowhere(open_site: OpenSite) -> str:
    """A URL at which nothing listens any more."""
    site = open_site(lambda _: None)
    site.close()
    return site.url


class TestPatience:
    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_none_asks_once(self, connect: Connect, open_site: OpenSite, status: int) -> None:
        site = open_site(lambda _: problem(status, "busy", Retry_After="0"))
        waits: list[str] = []
        with pytest.raises(RefServerError) as refused:
            connect(site.url, patience=0, on_wait=lambda reason, seconds: waits.append(reason)).model()
        assert (refused.value.status, len(site.requests), waits) == (status, 1, [])

    def test_none_and_no_server(self, connect: Connect, open_site: OpenSite) -> None:
        url = nowhere(open_site)
        with pytest.raises(Unreachable, match=f"no server answers at {re.escape(url)}") as silent:
            connect(url, patience=0).model()
        assert silent.value.passes and not silent.value.done

    @pytest.mark.usefixtures("no_backoff")
    def test_some_ends(self, connect: Connect, open_site: OpenSite) -> None:
        site = open_site(lambda _: problem(503, "not_ready"))
        seconds: list[float] = []
        with pytest.raises(RefServerError):
            connect(site.url, patience=0.2, on_wait=lambda _, waited: seconds.append(waited)).model()
        assert len(site.requests) == len(seconds) + 1 > 1
        assert max(seconds) < 0.2

    def test_a_wish_beyond_it_ends_it_at_once(self, connect: Connect, open_site: OpenSite) -> None:
        site = open_site(lambda _: problem(429, "queue_full", Retry_After="3600"))
        with pytest.raises(RefServerError) as refused:
            connect(site.url, patience=60).model()
        assert (len(site.requests), refused.value.retry_after) == (1, 3600)

    def test_a_glance_asks_once(self, connect: Connect, open_site: OpenSite) -> None:
        site = open_site(lambda _: problem(503, "not_ready"))
        client = connect(site.url, patience=None)
        assert client.glance() is None and len(site.requests) == 1
        assert connect(nowhere(open_site), patience=None).glance() is None

    def test_so_does_a_look_at_its_readiness(self, connect: Connect, open_site: OpenSite) -> None:
        site = open_site(lambda _: problem(503, "not_ready", "the model is loading"))
        client = connect(site.url, patience=None)
        assert client.not_ready_reason() == "the model is loading" and len(site.requests) == 1
        assert connect(open_site(lambda _: Answer(200, b"ok")).url).not_ready_reason() is None
        assert "no server answers" in connect(nowhere(open_site), patience=None).not_ready_reason()


@pytest.mark.usefixtures("no_backoff")
class TestRequeue:
    """It alone is not the same when it is done twice."""

    def test_is_not_repeated_when_it_may_have_been_done(self, connect: Connect, open_site: OpenSite) -> None:
        site = open_site(lambda _: None)
        with pytest.raises(Unreachable) as broken:
            connect(site.url, patience=None).requeue(ID)
        assert len(site.requests) == 1 and broken.value.done

    @pytest.mark.parametrize("status", [500, 502, 504])
    def test_nor_after_a_failure_in_the_middle(self, connect: Connect, open_site: OpenSite, status: int) -> None:
        site = open_site(lambda _: problem(status, "internal"))
        with pytest.raises(RefServerError):
            connect(site.url, patience=None).requeue(ID)
        assert len(site.requests) == 1

    @pytest.mark.parametrize("status", [429, 503])
    def test_is_repeated_when_it_was_not_done(self, connect: Connect, open_site: OpenSite, status: int) -> None:
        answers = [problem(status, "busy"), respond(200, {"id": ID, "state": "ready"})]
        site = open_site(lambda _: answers.pop(0))
        assert connect(site.url, patience=None).requeue(ID).state == "ready"
        assert [(request.method, request.path) for request in site.requests] == [
            ("POST", f"/v1/batches/{ID}/requeue")
        ] * 2

    def test_a_drop_is_repeated(self, connect: Connect, open_site: OpenSite) -> None:
        answers = [None, Answer(204)]
        site = open_site(lambda _: answers.pop(0))
        connect(site.url, patience=None).drop("a/b")
        assert [request.path for request in site.requests] == ["/v1/batches/a%2Fb"] * 2


def test_a_reference_is_put(connect: Connect, open_site: OpenSite) -> None:
    site = open_site(lambda _: respond(200, {"reference_version": 3}))
    assert connect(site.url).replace_reference("step-200", 3).reference_version == 3
    (request,) = site.requests
    assert (request.method, request.path) == ("PUT", "/v1/reference")
    assert json.loads(request.body) == {"snapshot": "step-200", "version": 3}


class TestOtherServers:
    @pytest.mark.parametrize("body", [b"<html>hello</html>", b"[]", b'{"name": 7}', b"\xff"])
    def test_an_answer_that_is_not_of_this_api(self, connect: Connect, open_site: OpenSite, body: bytes) -> None:
        site = open_site(lambda _: Answer(200, body))
        with pytest.raises(NotRefServer, match=re.escape(site.url)):
            connect(site.url, patience=None).model()
        assert len(site.requests) == 1

    def test_a_lease_without_its_headers(self, connect: Connect, open_site: OpenSite) -> None:
        site = open_site(lambda _: Answer(200, b"no batch"))
        with pytest.raises(NotRefServer):
            connect(site.url, patience=None).lease(LeaseBody(consumer="me"))

    def test_a_body_in_an_encoding_that_it_is_not_in(self, connect: Connect, open_site: OpenSite) -> None:
        site = open_site(lambda _: Answer(200, b"no gzip", {"Content-Encoding": "gzip"}))
        with pytest.raises(NotRefServer):
            connect(site.url, patience=None).model()

    @pytest.mark.parametrize("status", [400, 502])
    def test_an_answer_without_a_code_is_shown_as_it_is(
        self, connect: Connect, open_site: OpenSite, status: int
    ) -> None:
        site = open_site(lambda _: Answer(status, b"hello"))
        with pytest.raises(RefServerError, match=f"^the answer was {status} .*: hello$") as refused:
            connect(site.url, patience=0).model()
        assert (refused.value.code, refused.value.request_id) == (None, None)

    def test_code_and_request_are_named(self, connect: Connect, open_site: OpenSite) -> None:
        site = open_site(lambda _: problem(403, "forbidden", "this needs a token of role admin"))
        with pytest.raises(RefServerError, match="role admin") as refused:
            connect(site.url, patience=None).drop(ID)
        assert (refused.value.code, refused.value.request_id) == ("forbidden", "r7")


class TestPages:
    def test_follow_the_cursor(self, connect: Connect, open_site: OpenSite) -> None:
        def page(request: Request) -> Answer:
            number = 1 + sum("cursor" in asked.path for asked in site.requests)
            summary = {"id": f"batch {number}", "run": "r", "state": "ready", "reason": None, "consumer": None}
            numbers = ("epoch", "policy_version", "admitted_at", "prompt_tokens", "completion_tokens", "completions")
            numbers += ("payload_bytes", "deliveries", "scoring_attempts")
            cursor = f"to/{number}?" if number < 3 else None
            return respond(200, {"batches": [summary | dict.fromkeys(numbers, 1)], "next_cursor": cursor})

        site = open_site(page)
        found = connect(site.url).batches(state="ready", run="a b")
        assert [batch.id for batch in found] == ["batch 1", "batch 2", "batch 3"]
        assert [request.path.partition("?")[2] for request in site.requests] == [
            f"state=ready&run=a+b&limit=1000{cursor}&order=oldest"
            for cursor in ("", "&cursor=to%2F1%3F", "&cursor=to%2F2%3F")
        ]


class TestToken:
    def test_is_sent_and_shown_nowhere(
        self, connect: Connect, open_site: OpenSite, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        answers = [problem(401, "unauthorized", "this token is not known here"), respond(200, MODEL)]
        site = open_site(lambda _: answers.pop(0))
        client = connect(site.url, token=SECRET)
        with pytest.raises(RefServerError) as refused:
            client.model()
        assert client.model().name == "m"
        assert [request.headers["authorization"] for request in site.requests] == [f"Bearer {SECRET}"] * 2
        assert SECRET not in f"{client!r} {refused.value!r} {refused.value} {caplog.text}"
        assert "GET" in caplog.text, "something was logged"

    @pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "schlüssel", "a#b"])
    def test_that_no_header_carries(self, token: str) -> None:
        with pytest.raises(ValueError, match=r"^token: ") as refused:
            RefServerClient("http://127.0.0.1:1", token=token)
        assert not token or token not in str(refused.value)

    def test_a_client_without_one_sends_none(self, connect: Connect, open_site: OpenSite) -> None:
        site = open_site(lambda _: respond(200, MODEL))
        connect(site.url).model()
        assert "authorization" not in site.requests[0].headers


def test_every_method_says_what_it_does() -> None:
    methods = inspect.getmembers(RefServerClient, inspect.isfunction)
    assert all(method.__doc__ for name, method in methods if not name.startswith("_") and name != "close")
