"""Published weights through the client: files of any length, cut off and damaged on their way."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from ref_server.service.service import Service
from shared.api import WeightsFile, WeightsName
from shared.client import RefServerError, Unreachable, WrongContent
from shared.client.transfers import content_digest
from tests.ref_server.conftest import make_service, model, one_thread, serve, tokenizer

__all__ = ["make_service", "model", "one_thread", "serve", "tokenizer"]

Connect = Callable[..., Any]
RUNS = count()
DATA = bytes(range(256)) * 16_384  # longer than any body of the server below
CONTENT = WeightsFile(bytes=len(DATA), sha256=sha256(DATA).hexdigest())
NAME = WeightsName("run", "first", 0, 1)
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def url(
    make_service: Callable[..., Service], serve: Callable[[Service], AbstractContextManager[httpx.Client]]
) -> Iterator[str]:
    with serve(make_service(max_body_mib=1)) as http:
        yield str(http.base_url)


@pytest.fixture
def name() -> WeightsName:
    return WeightsName(f"run-{next(RUNS)}", "first", 0, 1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / FILE).write_bytes(DATA)
    return tmp_path / FILE


class Cutting(BaseHTTPRequestHandler):
    """Answers a file with Range. sends: how many bytes each answer has before its connection is cut; then all.

    damaged: so many answers have a wrong first byte. ranges_ignored: it always answers the whole file.
    """

    protocol_version = "HTTP/1.1"
    sends: list[int]
    damaged = 0
    ranges_ignored = False
    ranges: list[str | None]
    received: list[tuple[Mapping[str, str], int]]

    def do_GET(self) -> None:
        requested = self.headers["Range"]
        self.ranges.append(requested)
        if self.ranges_ignored:
            requested = None
        start = int(requested.removeprefix("bytes=").removesuffix("-")) if requested else 0
        body = DATA[start:]
        if type(self).damaged > 0:
            type(self).damaged -= 1
            body = b"x" + body[1:]
        self.send_response(206 if requested else 200)
        self.send_header("Content-Length", str(len(body)))
        if requested:
            self.send_header("Content-Range", f"bytes {start}-{len(DATA) - 1}/{len(DATA)}")
        self.end_headers()
        self._send(body)

    def do_PUT(self) -> None:
        length = self.sends.pop(0) if self.sends else int(self.headers["Content-Length"])
        self.received.append((dict(self.headers), len(self.rfile.read(length))))
        if length < int(self.headers["Content-Length"]):
            self.close_connection = True
            self.connection.close()
            return
        body = CONTENT.model_dump_json().encode()
        self.send_response(201)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send(self, body: bytes) -> None:
        length = self.sends.pop(0) if self.sends else len(body)
        self.wfile.write(body[:length])
        self.close_connection = length < len(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def cut() -> Callable[..., AbstractContextManager[tuple[str, type[Cutting]]]]:
    @contextmanager
    def run(*sends: int, damaged: int = 0, ranges_ignored: bool = False) -> Iterator[tuple[str, type[Cutting]]]:
        fields = {"sends": [*sends], "damaged": damaged, "ranges_ignored": ranges_ignored, "ranges": [], "received": []}
        handler = type("Handler", (Cutting,), fields)
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", handler
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    return run


def test_from_disk_to_disk(connect: Connect, url: str, name: WeightsName, source: Path, tmp_path: Path) -> None:
    client = connect(url)
    assert client.newest_weights(name.run) is None
    assert client.put_weights(name, source) == CONTENT
    assert client.put_weights(name, source) == CONTENT
    committed = client.commit_weights(name, {FILE: CONTENT}, {"next_index": 3})
    assert (committed.name, committed.files, committed.words) == (name, {FILE: CONTENT}, {"next_index": 3})
    assert client.newest_weights(name.run) == client.weights(name) == committed
    client.download_weights(name, FILE, CONTENT, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == DATA
    assert {path.name for path in tmp_path.iterdir()} == {FILE, "copy"}


def test_refusals_are_raised_at_once(
    connect: Connect, url: str, name: WeightsName, source: Path, tmp_path: Path
) -> None:
    client = connect(url)
    with pytest.raises(RefServerError) as missing:
        client.commit_weights(name, {FILE: CONTENT}, {})
    assert (missing.value.status, missing.value.field) == (422, f"files.{FILE}")
    with pytest.raises(RefServerError) as unknown:
        client.download_weights(name, FILE, CONTENT, tmp_path / "copy")
    assert unknown.value.status == 404
    assert {path.name for path in tmp_path.iterdir()} == {FILE}


@pytest.mark.usefixtures("no_backoff")
def test_a_download_goes_on_where_it_broke_off(connect: Connect, cut: Any, tmp_path: Path) -> None:
    with cut(1_000_000, 0, 100_000, 7) as (url, site):
        connect(url).download_weights(NAME, FILE, CONTENT, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == DATA
    begins = [int(re.sub("[^0-9]", "", header or "0")) for header in site.ranges]
    assert begins[0] == 0
    assert begins[1:] == sorted(begins[1:])
    assert begins[-1] > 0


@pytest.mark.usefixtures("no_backoff")
def test_a_download_begins_anew_where_the_server_ignores_ranges(connect: Connect, cut: Any, tmp_path: Path) -> None:
    with cut(1_000_000, 100_000, ranges_ignored=True) as (url, site):
        connect(url).download_weights(NAME, FILE, CONTENT, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == DATA
    assert len(site.ranges) == 3


@pytest.mark.usefixtures("no_backoff")
def test_patience_begins_anew_with_each_piece(
    connect: Connect, cut: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client with less patience than a download takes: it gives up only where nothing more comes."""
    seconds = count(0, 0.05)
    clock = SimpleNamespace(monotonic=lambda: next(seconds), sleep=time.sleep)
    monkeypatch.setattr("shared.client.retry.time", clock)
    with cut(*[300_000] * 8) as (url, _):
        connect(url, patience=0.2).download_weights(NAME, FILE, CONTENT, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == DATA
    with cut(300_000, *[0] * 100) as (url, _), pytest.raises(Unreachable):
        connect(url, patience=0.2).download_weights(NAME, FILE, CONTENT, tmp_path / "other")
    assert {path.name for path in tmp_path.iterdir()} == {"copy"}


@pytest.mark.parametrize(("damaged", "right"), [(1, True), (2, True), (3, False)])
def test_a_damaged_file_is_fetched_anew(connect: Connect, cut: Any, tmp_path: Path, damaged: int, right: bool) -> None:
    with cut(damaged=damaged) as (url, site):
        if right:
            connect(url).download_weights(NAME, FILE, CONTENT, tmp_path / "copy")
            assert (tmp_path / "copy").read_bytes() == DATA
        else:
            with pytest.raises(WrongContent, match="copy has SHA-256"):
                connect(url).download_weights(NAME, FILE, CONTENT, tmp_path / "copy")
            assert not list(tmp_path.iterdir())
    assert site.ranges == [None] * min(damaged + 1, 3)


def test_a_file_that_is_too_long_is_wrong(connect: Connect, cut: Any, tmp_path: Path) -> None:
    shorter = WeightsFile(bytes=10, sha256=CONTENT.sha256)
    with cut() as (url, _), pytest.raises(WrongContent, match="longer than its 10 bytes"):
        connect(url).download_weights(NAME, FILE, shorter, tmp_path / "copy")


@pytest.mark.usefixtures("no_backoff")
def test_an_upload_that_broke_off_is_sent_again(connect: Connect, cut: Any, source: Path) -> None:
    with cut(500_000, 0) as (url, site):
        assert connect(url, patience=None).put_weights(NAME, source) == CONTENT
    headers, length = site.received[-1]
    assert length == int(headers["Content-Length"]) == len(DATA)
    assert headers["Content-Digest"] == content_digest(CONTENT)
    assert "Transfer-Encoding" not in headers
    assert len(site.received) == 3


def test_what_is_no_reference_server(connect: Connect, open_site: Any, tmp_path: Path) -> None:
    site = open_site(lambda _: site.answer(200, json.dumps({"a": 1}).encode()))
    with pytest.raises(WrongContent):
        connect(site.url).download_weights(NAME, FILE, WeightsFile(bytes=8, sha256="0" * 64), tmp_path / "copy")
