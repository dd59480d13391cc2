"""Rewards of a server on a socket that is down, slow, broken, restarted, or right to refuse."""

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from typing import Any

import pytest
from structlog.testing import capture_logs

from policy_trainer.config import HttpRewardConfig
from policy_trainer.data.problem import Problem, Sample
from policy_trainer.rewards.http_reward import TOKEN_VARIABLE, HttpReward
from shared.errors import UserError
from tests.ports import free_port
from tests.site import Answer, Request, open_site

__all__ = ["open_site"]

OpenSite = Callable[..., Any]
SAMPLE = Sample(Problem("2"), "said", 7)
ONE = Answer(200, b'{"rewards": [1]}')


def reward(url: str, **config: Any) -> HttpReward:
    return HttpReward(url, HttpRewardConfig(**{"patience": 30.0, **config}))


def samples(*texts: str) -> list[Sample]:
    return [Sample(Problem("2"), text) for text in texts]


def by_length(request: Request) -> Answer:
    judged = [len(sample["completion"]) for sample in json.loads(request.body)["samples"]]
    return Answer(200, json.dumps({"rewards": judged, "took": 0.1}).encode())


@pytest.fixture
def raw_site() -> Iterator[Callable[..., str]]:
    """Opens a server that sends these bytes, one string for each connection, and holds the last connections open."""
    held: list[socket.socket] = []

    def make(*answers: bytes, hold: bool = False, drip: bool = False) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        held.append(listener)

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                held.append(connection)
                asked = b""
                while not asked.endswith(b"]}"):  # closed with bytes unread, a connection loses those it has sent
                    asked += connection.recv(2**16) or b"]}"
                for piece in [answer[i : i + 1] for i in range(len(answer))] if drip else [answer]:
                    connection.sendall(piece)
                    time.sleep(0.02 if drip else 0)
                if not hold:
                    connection.close()

        def work() -> None:
            with suppress(OSError):  # the client has gone, or the test is over
                serve()

        threading.Thread(target=work, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/"

    yield make
    for one in held:
        one.close()


class TestWhatItAsks:
    def test_one_request_for_many_samples(self, open_site: OpenSite) -> None:
        site = open_site(by_length)
        assert reward(f"{site.url}/judge?of=me").scores(samples("a", "bcd", "")) == [1, 3, 0]
        (request,) = site.requests
        assert (request.method, request.path) == ("POST", "/judge?of=me")
        assert request.headers["content-type"] == "application/json"
        assert "authorization" not in request.headers

    def test_samples_have_what_a_function_gets(self, open_site: OpenSite) -> None:
        site = open_site(lambda request: Answer(200, b'{"rewards": [0, 0]}'))
        asked = ({"role": "user", "content": "1+1=?"},)
        extras = {"numbers": (1, 1), "day": date(2026, 1, 2), "bytes": b"\xff", "none": math.nan, "tokens": "mine"}
        problems = Problem("2", asked, extras=extras), Problem("", prompt="1+1=")
        told = [Sample(problems[0], "é\ud83d\ude00", 7, finished=False), Sample(problems[1], "2", 3)]
        reward(site.url).scores(told)
        assert json.loads(site.requests[0].body) == {
            "samples": [
                {
                    "numbers": [1, 1], "day": "2026-01-02", "bytes": "_w==", "none": None, "tokens": 7,
                    "completion": "é😀", "answer": "2", "prompt": "", "finished": False,
                    "messages": [{"role": "user", "content": "1+1=?"}],
                },
                {"completion": "2", "prompt": "1+1=", "messages": [], "tokens": 3, "finished": True},
            ]
        }  # fmt: skip

    def test_nothing_for_no_samples(self, open_site: OpenSite) -> None:
        site = open_site(by_length)
        assert reward(site.url).scores([]) == []
        assert site.requests == []

    def test_batches(self, open_site: OpenSite) -> None:
        site = open_site(by_length)
        assert reward(site.url, batch_size=2).scores(samples("a", "bc", "def", "", "g")) == [1, 2, 3, 0, 1]
        assert [len(json.loads(request.body)["samples"]) for request in site.requests] == [2, 2, 1]

    def test_a_token_of_the_environment(self, open_site: OpenSite, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
        site = open_site(lambda request: Answer(403, b"who are you?"))
        with pytest.raises(UserError) as refused:
            reward(site.url).scores([SAMPLE])
        assert site.requests[0].headers["authorization"] == "Bearer s3cret"
        assert "s3cret" not in str(refused.value)

    def test_no_proxy_for_this_machine(self, open_site: OpenSite, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
        monkeypatch.setenv("all_proxy", f"http://127.0.0.1:{free_port()}")
        assert reward(open_site(by_length).url).scores(samples("a")) == [1]


class TestNull:
    def test_is_not_judged_and_counted(self, open_site: OpenSite) -> None:
        site = open_site(lambda request: Answer(200, b'{"rewards": [0.5, null, true, NaN]}'))
        judge = reward(site.url)
        with capture_logs() as logs:
            assert judge.scores(samples(*"abcd")) == pytest.approx([0.5, math.nan, 1, math.nan], nan_ok=True)
        assert judge.failures.counts == {site.url: 2}
        assert [(line["reward"], line["exception"]) for line in logs] == [(site.url, "the server answered null for it")]

    def test_for_all_of_the_first_samples_ends_the_run(self, open_site: OpenSite) -> None:
        site = open_site(lambda request: Answer(200, json.dumps({"rewards": [None] * 32}).encode()))
        judge = reward(site.url, batch_size=32)
        with pytest.raises(UserError, match=r"failed on each of the first 96 completions: .* null"):
            judge.scores(samples(*"abcd" * 32))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(200, b"<html> hello\n world"), r"'<html> hello world' instead of \{\"rewards\": \[…\]\}"),
        (Answer(200, b""), r"'' instead of"),
        (Answer(204), r"'' instead of"),
        (Answer(200, b"\xff\xfe"), r"instead of"),
        (Answer(200, b"[1.0]"), r"'\[1.0\]' instead of"),
        (Answer(200, b'{"scores": [1]}'), r"instead of"),
        (Answer(200, b'{"rewards": 1}'), r"instead of"),
        (Answer(200, b'{"rewards": {"0": 1}}'), r"instead of"),
        (Answer(200, b'{"rewards": ' + b"[" * 200_000), r"instead of"),
        (Answer(200, b'{"rewards": [' + b"1" * 5000 + b"]}"), r"instead of"),
        (Answer(200, b'{"rewards": []}'), r"0 rewards for 1 samples"),
        (Answer(200, b'{"rewards": [1, 2]}'), r"2 rewards for 1 samples"),
        (Answer(200, b'{"rewards": ["1"]}'), r"a wrong one: a reward must be a number, got the text '1'"),
        (Answer(200, b'{"rewards": [[1]]}'), r"a wrong one: a reward must be a number or None, got list"),
        (Answer(200, b'{"rewards": [Infinity]}'), r"a wrong one: .* at most 1e\+06, got inf"),
        (Answer(200, b'{"rewards": [-1e7]}'), r"a wrong one: .* at most 1e\+06, got -1"),
        (Answer(200, b'{"rewards": [1' + b"0" * 400 + b"]}"), r"a wrong one: "),
        (Answer(200, b'{"rewards": [1]}' + b" " * 2**25), r"more than 16777216 bytes"),
        (Answer(404, b"no such judge"), r"answered 404 Not Found: no such judge"),
        (Answer(422, b'{"detail": "field completion"}'), r"answered 422 Unprocessable Entity: .*field completion"),
        (Answer(400, b"x" * 10_000), r"answered 400 Bad Request: x{300}$"),
        (Answer(307, headers={"Location": "http://elsewhere/"}), r"307 .* to http://elsewhere/; .* not followed"),
    ],
)  # fmt: skip
def test_what_is_no_judgement_ends_the_run_by_words(answer: Answer, words: str, open_site: OpenSite) -> None:
    site = open_site(lambda request: answer)
    with pytest.raises(UserError, match=rf"^rewards: {site.url}/r answered {'.*' if words[0] != 'a' else ''}") as told:
        reward(f"{site.url}/r").scores([SAMPLE])
    told.match(words)
    assert len(site.requests) == 1  # it is not asked again


class TestPatience:
    @pytest.mark.parametrize("status", [500, 502, 503, 429])
    def test_a_server_that_fails_is_asked_again(self, status: int, open_site: OpenSite) -> None:
        answers = iter([Answer(status, b"later"), Answer(status, b"later"), ONE])
        site = open_site(lambda request: next(answers))
        judge = reward(site.url)
        assert judge.scores([SAMPLE]) == [1]
        assert len(site.requests) == 3
        assert judge.failures.counts == {site.url: 0}

    def test_batches_that_were_judged_are_not_asked_for_again(self, open_site: OpenSite) -> None:
        answers = iter([ONE, Answer(500), ONE])
        site = open_site(lambda request: next(answers))
        assert reward(site.url, batch_size=1).scores([SAMPLE, SAMPLE]) == [1, 1]

    def test_retry_after(self, open_site: OpenSite) -> None:
        answers = iter([Answer(429, headers={"Retry-After": "1"}), ONE])
        site = open_site(lambda request: next(answers))
        began = time.monotonic()
        assert reward(site.url).scores([SAMPLE]) == [1]
        assert time.monotonic() - began >= 1

    def test_a_retry_after_beyond_the_patience_is_not_waited_for(self, open_site: OpenSite) -> None:
        site = open_site(lambda request: Answer(503, b"asleep", {"Retry-After": "100"}))
        with pytest.raises(UserError, match=r"not judged for judging\.http\.patience = 30 s: 503 .*: asleep"):
            reward(site.url).scores([SAMPLE])
        assert len(site.requests) == 1

    def test_ends(self) -> None:
        url = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(UserError, match=rf"rewards: {url} has not judged for .* = 0.2 s: .*refused"):
            reward(url, patience=0.2).scores([SAMPLE])

    def test_a_server_that_starts_later(self, open_site: OpenSite) -> None:
        port = free_port()
        threading.Timer(0.3, lambda: open_site(by_length, port)).start()
        assert reward(f"http://127.0.0.1:{port}").scores(samples("ab")) == [2]

    def test_a_server_that_is_restarted_in_the_middle(self, open_site: OpenSite) -> None:
        """It ends with a request that it never answers; the next one finds nobody, then the new server."""
        port, arrived = free_port(), threading.Event()

        def die(request: Request) -> None:
            arrived.set()

        first = open_site(die, port)

        def restart() -> None:
            arrived.wait()
            first.close()
            open_site(by_length, port)

        thread = threading.Thread(target=restart)
        thread.start()
        assert reward(f"http://127.0.0.1:{port}").scores(samples("ab", "c")) == [2, 1]
        thread.join()

    def test_what_it_waits_for_is_told(self, open_site: OpenSite, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("policy_trainer.lifecycle.timing._QUIET_SECONDS", 0.0)
        answers = iter([Answer(503, b"loading"), ONE])
        site = open_site(lambda request: next(answers))
        with capture_logs() as logs:
            reward(site.url).scores([SAMPLE])
        assert [(line["event"], line["reason"]) for line in logs] == [
            ("waiting", f"the reward server at {site.url} does not judge: 503 Service Unavailable: loading")
        ]


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n"
GOOD = HEAD + b'{"rewards": [1]}'


class TestBrokenAnswers:
    @pytest.mark.parametrize(
        "broken",
        [
            b"",
            b"HTTP/1.1 200",
            GOOD[:-3],
            b"HTTP/1.0 200 OK\r\n\r\n" + b'{"rewards": [1',
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
            b"what is this?\r\n\r\n",
        ],
    )
    def test_are_asked_for_again(self, broken: bytes, raw_site: Callable[..., str]) -> None:
        assert reward(raw_site(broken, GOOD)).scores([SAMPLE]) == [1]

    def test_that_end_with_the_connection_are_good(self, raw_site: Callable[..., str]) -> None:
        assert reward(raw_site(b'HTTP/1.0 200 OK\r\n\r\n{"rewards": [1]}\n')).scores([SAMPLE]) == [1]

    @pytest.mark.parametrize("begun", [b"", GOOD[:10], GOOD[:-1]])
    def test_that_hang_are_asked_for_again(self, begun: bytes, raw_site: Callable[..., str]) -> None:
        assert reward(raw_site(begun, GOOD, hold=True), seconds=0.2).scores([SAMPLE]) == [1]

    def test_that_always_come_late(self, raw_site: Callable[..., str]) -> None:
        url = raw_site(*[b""] * 9, hold=True)
        with pytest.raises(UserError, match=r"patience = 0\.3 s: it took more than judging\.http\.seconds = 0\.2"):
            reward(url, seconds=0.2, patience=0.3).scores([SAMPLE])

    def test_that_drip(self, raw_site: Callable[..., str]) -> None:
        """Each byte comes in time, all of them do not."""
        slow = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b" " * 84 + b'{"rewards": [1]}'
        with pytest.raises(UserError, match=r"it took more than judging\.http\.seconds = 1"):
            reward(raw_site(slow, drip=True), seconds=1, patience=0.5).scores([SAMPLE])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://", r"rewards: 'http://' names no host: give http://HOST:PORT/PATH"),
        ("http:///judge", r"names no host"),
        ("http://host:port/", r"rewards: 'http://host:port/' is no URL"),
        ("https://me:s3cret@host/", rf"the URL of host has a name or password: give a token in {TOKEN_VARIABLE}"),
        ("http://host/" + "x" * 200, r"at most 200 characters, the URL of host more"),
    ],
)  # fmt: skip
def test_urls_that_are_refused(url: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        reward(url)
    assert "s3cret" not in str(refused.value)


def test_a_token_that_no_header_can_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "a\nb")
    with pytest.raises(UserError, match=rf"{TOKEN_VARIABLE}: token: must be made of letters") as refused:
        reward("http://host/")
    assert "a\nb" not in str(refused.value)


def test_a_server_that_speaks_no_tls(open_site: OpenSite) -> None:
    url = open_site(by_length).url.replace("http:", "https:")
    with pytest.raises(UserError, match=r"rewards: no server answers at .* may have to begin with http://"):
        reward(url).scores([SAMPLE])
