"""The client against a program that answers without end, compressed, or with control characters."""

import gzip
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shared.api import LeaseBody
from shared.client import NotRefServer, RefServerError
from shared.client import client as client_module
from tests.site import Answer

_PIECE = b" " * 2**20


class _Endless(socketserver.StreamRequestHandler):
    status = b"200 OK"

    def handle(self) -> None:
        while self.rfile.readline().strip():
            pass
        self.wfile.write(b"HTTP/1.1 " + self.status + b"\r\nContent-Type: application/json\r\n\r\n")
        try:
            while True:
                self.wfile.write(_PIECE)
        except OSError:  # the client has closed the connection
            self.server.left.set()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(params=[b"200 OK", b"500 Internal Server Error"])
def endless(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server whose answers never end."""
    handler = type("Handler", (_Endless,), {"status": request.param})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.left = threading.Event()  # pyright: ignore[reportAttributeAccessIssue]
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def test_an_endless_answer_is_read_up_to_a_limit(connect: Callable[..., Any], endless: Any) -> None:
    url = f"http://127.0.0.1:{endless.server_address[1]}"
    with pytest.raises(NotRefServer, match=rf"{url} .* longer than 64 MiB.*\(GET /v1/model\)"):
        connect(url, patience=None).model()
    assert endless.left.wait(60)


def test_a_body_of_batches_has_a_limit_of_its_own(
    connect: Callable[..., Any], open_site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "BATCH_BYTES", 1000)
    site = open_site(lambda _: Answer(200, b" " * 1001))
    client = connect(site.url, patience=None)
    for lease in (client.lease, client.lease_many):
        with pytest.raises(NotRefServer, match="longer than"):
            lease(LeaseBody(consumer="me"))


def test_no_answer_is_expanded(connect: Callable[..., Any], open_site: Any) -> None:
    bomb = gzip.compress(gzip.compress(_PIECE))
    site = open_site(lambda _: Answer(200, bomb, {"Content-Encoding": "gzip, gzip"}))
    with pytest.raises(NotRefServer, match="compressed"):
        connect(site.url, patience=None).model()
    assert site.requests[0].headers["accept-encoding"] == "identity"


def test_a_compressed_error_of_a_gateway_is_an_error(connect: Callable[..., Any], open_site: Any) -> None:
    site = open_site(lambda _: Answer(502, gzip.compress(b"down"), {"Content-Encoding": "gzip"}))
    with pytest.raises(RefServerError) as caught:
        connect(site.url, patience=0).model()
    assert caught.value.status == 502


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"error": {"code": "busy", "message": "a\x1b]0;owned\x07\nb\u202e" + "c" * 9999}}).encode(),
        b"a\x1b]0;owned\x07\nb\xe2\x80\xae",
    ],
)
def test_a_message_cannot_steer_a_terminal(connect: Callable[..., Any], open_site: Any, body: bytes) -> None:
    waits: list[str] = []

    def on_wait(reason: str, seconds: float) -> None:
        waits.append(reason)
        raise InterruptedError

    site = open_site(lambda _: Answer(503, body))
    with pytest.raises(RefServerError) as caught:
        connect(site.url, patience=0).model()
    with pytest.raises(InterruptedError):
        connect(site.url, patience=None, on_wait=on_wait).model()
    for text in (str(caught.value), caught.value.message, *waits):
        assert text.isprintable() and len(text) < 5000
        assert "a\\x1b]0;owned\\x07 b\\u202e" in text


def test_json_of_many_levels_is_no_traceback(connect: Callable[..., Any], open_site: Any) -> None:
    site = open_site(lambda _: Answer(500, b"[" * 200_000))
    with pytest.raises(RefServerError, match="500"):
        connect(site.url, patience=0).model()
