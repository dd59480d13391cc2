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
from tests.harness.ports import free_port
from tests.site import Answer, Request, open_site

__all__ = ["open_site"]

OpenSite = Callable[..., Any]
SAMPLE = Sample(Problem("2"), "said", 7)
single = Answer(200, b'{"rewards": [1]}')


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
                request = b""
                while not request.endswith(b"]}"):  # closed with bytes unread, a connection loses those it has sent
                    request += connection.recv(2**16) or b"]}"
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
    for connection in held:
        connection.close()


class TestRequests:
    def test_samples_have_a_functions_arguments(self, open_site: OpenSite) -> None:
        site = open_site(lambda request: Answer(200, b'{"rewards": [0, 0]}'))
        question = ({"role": "user", "content": "1+1=?"},)
        extras = {"numbers": (1, 1), "day": date(2026, 1, 2), "bytes": b"\xff", "none": math.nan, "tokens": "mine"}
        problems = Problem("2", question, extras=extras), Problem("", prompt="1+1=")
        judged = [Sample(problems[0], "é\ud83d\ude00", 7, finished=False), Sample(problems[1], "2", 3)]
        reward(f"{site.url}/judge?of=me").scores(judged)
        (request,) = site.requests
        assert (request.method, request.path) == ("POST", "/judge?of=me")
        assert request.headers["content-type"] == "application/json" and "authorization" not in request.headers
        assert json.loads(request.body) == {
            "samples": [
                {
                    "numbers": [1, 1], "day": "2026-01-02", "bytes": "_w==", "none": None, "tokens": 7,
                    "completion": "é😀", "answer": "2", "prompt": "", "finished": False,
                    "messages": [{"role": "user", "content": "1+1=?"}],
                },
                {"completion": "2", "prompt": "1+1=", "messages": [], "tokens": 3, "finished": True},
            ]
        }  # fmt: skip

    def test_batches(self, open_site: OpenSite) -> None:
        site = open_site(by_length)
        assert reward(site.url).scores([]) == [] and not site.requests
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


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(200, b"<html> hello\n world"), r"'<html> hello world' instead of \{\"rewards\": \[…\]\}"),
        (Answer(200, b""), r"'' instead of"),
        (Answer(200, b"[1.0]"), r"'\[1.0\]' instead of"),
        (Answer(200, b'{"rewards": 1}'), r"instead of"),
        (Answer(200, b'{"rewards": ' + b"[" * 200_000), r"instead of"),
        (Answer(200, b'{"rewards": [' + b"1" * 5000 + b"]}"), r"instead of"),
        (Answer(200, b'{"rewards": [1, 2]}'), r"2 rewards for 1 samples"),
        (Answer(200, b'{"rewards": ["1"]}'), r"a wrong one: a reward must be a number, got the text '1'"),
        (Answer(200, b'{"rewards": [Infinity]}'), r"a wrong one: .* at most 1e\+06, got inf"),
        (Answer(200, b'{"rewards": [1' + b"0" * 400 + b"]}"), r"a wrong one: "),
        (Answer(200, b'{"rewards": [1]}' + b" " * 2**25), r"more than 16777216 bytes"),
        (Answer(404, b"no such judge"), r"answered 404 Not Found: no such judge"),
        (Answer(400, b"x" * 10_000), r"answered 400 Bad Request: x{300}$"),
        (Answer(307, headers={"Location": "http://elsewhere/"}), r"307 .* to http://elsewhere/; .* not followed"),
    ],
)  # fmt: skip
def test_an_answer_without_rewards_ends_the_run(answer: Answer, words: str, open_site: OpenSite) -> None:
    site = open_site(lambda request: answer)
    with pytest.raises(
        UserError, match=rf"^rewards: {site.url}/r answered {'.*' if words[0] != 'a' else ''}"
    ) as refused:
        reward(f"{site.url}/r").scores([SAMPLE])
    refused.match(words)
    assert len(site.requests) == 1  # without a retry


class TestPatience:
    def test_a_failing_server_is_retried(self, open_site: OpenSite) -> None:
        """For the same batch, after as many seconds as it says."""
        answers = iter([single, Answer(500), Answer(502), Answer(429, headers={"Retry-After": "1"}), single])
        site = open_site(lambda request: next(answers))
        judge, began = reward(site.url, batch_size=1), time.monotonic()
        assert judge.scores([SAMPLE, SAMPLE]) == [1, 1]
        assert len(site.requests) == 5 and time.monotonic() - began >= 1
        assert judge.failures.counts == {site.url: 0}

    @pytest.mark.parametrize(
        ("answer", "words"), [(None, "= 0.2 s: .*"), (Answer(503, b"asleep", {"Retry-After": "9"}), ": 503 .*: asleep")]
    )
    def test_ends(self, answer: Answer | None, words: str, open_site: OpenSite) -> None:
        """At once where the server says that it will be down for longer."""
        site = open_site(lambda request: answer)
        with pytest.raises(UserError, match=rf"{site.url} has not judged for judging\.http\.patience .*{words}"):
            reward(site.url, patience=0.2).scores([SAMPLE])
        assert len(site.requests) == 1 or answer is None

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

    def test_waits_are_logged(self, open_site: OpenSite, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("policy_trainer.processes.lifecycle.timing._QUIET_SECONDS", 0.0)
        answers = iter([Answer(503, b"loading"), single])
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
    @pytest.mark.parametrize("good", [GOOD, b'HTTP/1.0 200 OK\r\n\r\n{"rewards": [1]}\n'])
    def test_are_retried(self, broken: bytes, good: bytes, raw_site: Callable[..., str]) -> None:
        assert reward(raw_site(broken, good)).scores([SAMPLE]) == [1]

    @pytest.mark.parametrize("begun", [b"", GOOD[:-1]])
    def test_that_hang_are_retried(self, begun: bytes, raw_site: Callable[..., str]) -> None:
        assert reward(raw_site(begun, GOOD, hold=True), seconds=0.2).scores([SAMPLE]) == [1]

    def test_that_drip(self, raw_site: Callable[..., str]) -> None:
        """Each byte comes in time, all of them do not."""
        slow = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b" " * 84 + b'{"rewards": [1]}'
        with pytest.raises(UserError, match=r"it took more than judging\.http\.seconds = 1"):
            reward(raw_site(slow, drip=True), seconds=1, patience=0.5).scores([SAMPLE])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://", r"rewards: 'http://' names no host; give http://HOST:PORT/PATH"),
        ("http:///judge", r"names no host"),
        ("http://host:port/", r"rewards: 'http://host:port/' is no URL"),
        ("https://me:s3cret@host/", rf"the URL of host has a name or password; give a token in {TOKEN_VARIABLE}"),
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
