"""Requests and answers on a socket, whose other end runs users' code."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from typing import Any

import pytest

from policy_trainer.processes.messages import Connection, ProcessEnded, receive, serve

Open = Callable[[Callable[[socket.socket], Any]], Connection]


@pytest.fixture
def connect() -> Iterator[Open]:
    """A connection whose other end is served by a function in a thread."""
    opened: list[tuple[Connection, threading.Thread]] = []

    def start(other: Callable[[socket.socket], Any]) -> Connection:
        ours, theirs = socket.socketpair()

        def run() -> None:
            with theirs:
                other(theirs)

        thread = threading.Thread(target=run)
        thread.start()
        opened.append((Connection(ours, lambda: "ended"), thread))
        return opened[-1][0]

    yield start
    for connection, thread in opened:
        connection.close()
        thread.join()


def test_each_request_gets_its_answer(connect: Open) -> None:
    connection = connect(lambda other: serve(other, lambda request: {"got": request}))
    for number in range(3):
        assert connection.ask("try", 60, value=number) == {"got": {"do": "try", "value": number}}
    assert connection.alive


def test_a_request_may_have_several_answers(connect: Open) -> None:
    """Each has the whole time limit, and all may arrive at once."""
    guarded: list[float] = []

    def several(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for place in range(request["count"]):
            time.sleep(request["pause"])
            yield {"place": place}

    connection = connect(lambda other: serve(other, several, lambda seconds: nullcontext(guarded.append(seconds))))
    for count, pause in ((5, 0.3), (500, 0.0), (1, 0.0)):
        answers = list(connection.ask_each("try", 1.0, count, count=count, pause=pause))
        assert answers == [{"place": place} for place in range(count)]
    assert connection.alive and len(guarded) >= 506


def test_answers_that_nobody_awaits_end_the_connection(connect: Open) -> None:
    """They would cost the time of the next request."""
    connection = connect(lambda other: serve(other, lambda request: iter([{}, {}, {}])))
    answers = connection.ask_each("try", 60, 3)
    assert next(answers) == {} and not connection.alive
    answers.close()
    with pytest.raises(ProcessEnded, match=r"^ended$"):
        connection.ask("try", 60)


def test_large_messages(connect: Open) -> None:
    connection = connect(lambda other: serve(other, lambda request: {"text": request["text"]}))
    text = "\udfff\n" * 500_000
    assert connection.ask("try", 60, text=text) == {"text": text}


@pytest.mark.parametrize(
    "stray", [b"garbage", b"5\n", b"\xff\n[1]\n", b'{"number": 9, "value": "wrong"}\n', b"[" * 10**6]
)
def test_what_is_written_to_the_socket_by_mistake_is_dropped(connect: Open, stray: bytes) -> None:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        other.sendall(stray)
        return {"value": "right"}

    def run(connected: socket.socket) -> None:
        nonlocal other
        other = connected
        serve(connected, answer)

    other: socket.socket
    connection = connect(run)
    assert [connection.ask("try", 60) for _ in range(2)] == [{"value": "right"}] * 2


def test_an_answer_cannot_take_the_number_of_another(connect: Open) -> None:
    connection = connect(lambda other: serve(other, lambda request: {"number": 7, "value": 1}))
    assert connection.ask("try", 60) == {"value": 1}


def test_an_answer_that_never_ends_is_too_slow(connect: Open) -> None:
    """Though its beginning came in time, and something more arrives again and again."""
    ended = threading.Event()

    def drip(other: socket.socket) -> None:
        receive(other)
        while not ended.wait(0.01):
            other.sendall(b'{"number"')

    connection = connect(drip)
    with pytest.raises(ProcessEnded, match=r"took more than 0\.2 s") as raised:
        connection.ask("try", 0.2)
    ended.set()
    assert raised.value.too_slow and not connection.alive


def test_a_request_that_is_not_read_is_too_slow(connect: Open) -> None:
    ended = threading.Event()
    connection = connect(lambda other: ended.wait())
    with pytest.raises(ProcessEnded, match="took more than"):
        connection.ask("try", 0.2, text="x" * 10**7)
    ended.set()


def test_without_an_answer_it_says_how_the_other_has_ended(connect: Open) -> None:
    connection = connect(receive)
    for _ in range(2):
        with pytest.raises(ProcessEnded, match=r"^ended$") as raised:
            connection.ask("try", 60)
        assert not raised.value.too_slow


def test_what_json_cannot_have_is_not_sent(connect: Open) -> None:
    connection = connect(lambda other: serve(other, lambda request: {"got": request["value"]}))
    with pytest.raises(TypeError):
        connection.ask("try", 60, value=object())
    assert connection.ask("try", 60, value=1) == {"got": 1}


def test_closing_wakes_a_thread_that_asks(connect: Open) -> None:
    received = threading.Event()
    connection = connect(lambda other: (receive(other), received.set(), other.recv(1)))
    reasons: list[str] = []

    def ask() -> None:
        with pytest.raises(ProcessEnded) as raised:
            connection.ask("try", None)
        reasons.append(str(raised.value))

    thread = threading.Thread(target=ask)
    thread.start()
    received.wait()
    assert not connection.alive  # it is not idle
    connection.close()
    thread.join()
    assert reasons == ["ended"]


@pytest.mark.parametrize("wanted", [True, False])
def test_files_come_only_to_those_who_expect_them(connect: Open, wanted: bool) -> None:
    brought: list[int] = []

    def run(other: socket.socket) -> None:
        request, descriptors = receive(other, descriptors=wanted)
        brought.extend(descriptors)
        other.sendall(json.dumps({"number": request["number"]}).encode() + b"\n")

    connection, (end, given) = connect(run), os.pipe()
    assert connection.ask("try", 60, descriptors=[given], text="x" * 10**6) == {}
    os.close(given)
    with closing(os.fdopen(end, "rb")) as pipe:
        assert len(brought) == wanted
        for descriptor in brought:
            os.write(descriptor, b"here")
            os.close(descriptor)
        assert pipe.read() == (b"here" if wanted else b"")  # no other descriptor is open
