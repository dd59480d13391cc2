"""Fixtures for tests of HTTP clients: a server with given answers, and retries without backoff."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shared.client import retry


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


# None breaks the connection without an answer.
Respond = Callable[[Request], Answer | None]


class Site:
    """An HTTP server on this machine; it records its requests and answers them by `respond`."""

    answer = Answer

    def __init__(self, respond: Respond, port: int = 0) -> None:
        self.requests: list[Request] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else the body waits 40 ms for the acknowledgement of the head

            def handle_one(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = Request(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                site.requests.append(request)
                answer = respond(request)
                if answer is None:
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.body)

            do_GET = do_POST = do_PUT = do_DELETE = handle_one

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def open_site() -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(respond: Respond, port: int = 0) -> Site:
        sites.append(Site(respond, port))
        return sites[-1]

    yield make
    for site in sites:
        site.close()


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without waiting."""
    monkeypatch.setattr(retry, "pause", lambda error, attempt, longest: 0.0)
