"""Published weights over a real socket: uploads, commits, polls, and downloads that are interrupted and resumed."""

import base64
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from ref_server.service import weights as waiting
from ref_server.service.service import Service
from ref_server.weights import store as readers
from tests.harness.processes import until
from tests.ref_server.calls import MakeService, Serve
from tests.ref_server.sockets import answer, connected, head

RUNS = count()
BINARY = {"Content-Type": "application/octet-stream"}
FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 8192}  # twice the largest body in memory


@pytest.fixture
def at() -> str:
    """The URL of a lineage of a run that no other test uses."""
    return f"/v1/weights/run-{next(RUNS)}/first"


def digest(data: bytes) -> str:
    return f"sha-256=:{base64.b64encode(sha256(data).digest()).decode()}:"


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    """Status, code and field."""
    error = response.json()["error"]
    return response.status_code, error["code"], error.get("field")


def start_upload(connection: socket.socket, at: str, length: int, sent: bytes) -> None:
    lines = ("Content-Type: a/b", f"Content-Length: {length}")
    connection.sendall(head("PUT", f"{at}/0/1/file", *lines) + sent)


def manifest(files: Mapping[str, bytes] = FILES, **words: Any) -> dict[str, Any]:
    described = {name: {"bytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()}
    return {"files": described, **words}


def put(http: httpx.Client, url: str, data: bytes, **headers: str) -> httpx.Response:
    return http.put(url, content=data, headers=BINARY | {"Content-Digest": digest(data)} | headers)


def publish(http: httpx.Client, url: str, files: Mapping[str, bytes] = FILES, **words: Any) -> httpx.Response:
    for name, data in files.items():
        assert put(http, f"{url}/{name}", data).status_code == 201
    return http.post(f"{url}/commit", json=manifest(files, **words))


def test_a_version_from_upload_to_download(http: httpx.Client, at: str) -> None:
    run = at.rpartition("/")[0]
    assert http.get(run).status_code == 204
    for name, data in FILES.items():
        stored = put(http, f"{at}/0/1/{name}", data)
        assert (stored.status_code, stored.json()) == (201, manifest()["files"][name])
        assert put(http, f"{at}/0/1/{name}", data).status_code == 200
    assert http.get(run).status_code == 204
    words = manifest(next_index=3, sampling={"top_p": 1.0})
    expected = {"run": run.rpartition("/")[2], "lineage": "first", "epoch": 0, "version": 1} | words
    for _ in range(2):
        assert http.post(f"{at}/0/1/commit", json=words).json() == expected
    assert http.get(run).json() == http.get(f"{at}/0/1").json() == expected
    for name, data in FILES.items():
        got = http.get(f"{at}/0/1/{name}")
        assert got.content == data
        assert got.headers["ETag"] == f'"{sha256(data).hexdigest()}"'
        assert got.headers["Content-Digest"] == got.headers["Repr-Digest"] == digest(data)


def test_a_part_of_a_file(http: httpx.Client, at: str) -> None:
    publish(http, f"{at}/0/1")
    url, data = f"{at}/0/1/model.safetensors", FILES["model.safetensors"]
    part = http.get(url, headers={"Range": "bytes=1000000-", "If-Range": f'"{sha256(data).hexdigest()}"'})
    assert (part.status_code, part.content) == (206, data[1_000_000:])
    assert part.headers["Content-Range"] == f"bytes 1000000-{len(data) - 1}/{len(data)}"
    assert part.headers["Repr-Digest"] == digest(data)
    assert "Content-Digest" not in part.headers  # it would be that of the part
    assert http.get(url, headers={"Range": "bytes=5-", "If-Range": '"another"'}).content == data
    behind = http.get(url, headers={"Range": f"bytes={len(data)}-"})
    assert refusal(behind) == (416, "invalid_range", "Range")
    assert behind.headers["Content-Range"] == f"bytes */{len(data)}"
    assert refusal(http.get(url, headers={"Range": "bytes=b-a"})) == (422, "invalid_request", "Range")


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        (digest(b"b"), (422, "wrong_digest", "Content-Digest")),
        ("sha-256=:YQ==:", (422, "invalid_request", "Content-Digest")),
        ("md5=:YQ==:", (422, "invalid_request", "Content-Digest")),
        (f"sha-512=:YQ==:, {digest(b'a')}", None),
    ],
)
def test_the_digest_is_checked(http: httpx.Client, at: str, header: str, wanted: tuple[int, str, str] | None) -> None:
    stored = http.put(f"{at}/0/1/file", content=b"a", headers=BINARY | {"Content-Digest": header})
    assert stored.status_code == 201 if wanted is None else refusal(stored) == wanted


def test_refusals(http: httpx.Client, at: str) -> None:
    put(http, f"{at}/0/1/file", b"a")
    assert refusal(put(http, f"{at}/0/1/file", b"b")) == (409, "conflict", None)
    missing = http.post(f"{at}/0/1/commit", json=manifest({"file": b"a", "more": b"b"}))
    assert refusal(missing) == (422, "not_whole", "files.more")
    assert "more has not been uploaded" in missing.json()["error"]["message"]
    assert refusal(http.post(f"{at}/0/1/commit", json=manifest({"file": b"b"}))) == (422, "not_whole", "files.file")
    assert refusal(http.post(f"{at}/0/1/commit", json={"files": {}})) == (422, "invalid_request", "files")
    assert http.post(f"{at}/0/1/commit", json=manifest({"file": b"a"})).status_code == 200
    assert refusal(http.post(f"{at}/0/1/commit", json=manifest({"more": b"b"}))) == (409, "conflict", None)
    assert refusal(put(http, f"{at}/0/1/more", b"b")) == (409, "conflict", None)
    assert refusal(http.get(f"{at}/0/1/more")) == (404, "not_found", None)
    assert refusal(http.get(f"{at}/0/2")) == (404, "not_found", None)


@pytest.mark.parametrize("number", ["+0", "-1", "0.0", "1_0", "%200", "\u0660", str(2**63)])
def test_numbers_in_a_path_are_digits(http: httpx.Client, at: str, number: str) -> None:
    assert refusal(put(http, f"{at}/{number}/1/file", b"a")) == (422, "invalid_request", "path.epoch")
    assert refusal(http.get(f"{at}/0/{number}")) == (422, "invalid_request", "path.version")
    assert refusal(http.get(f"/v1/runs/a/metrics/{number}")) == (422, "invalid_request", "path.step")


@pytest.mark.parametrize("name", [".file", "..", "%2e%2e", "a%20b", "a\u00e9", "a%0A", "x" * 201, "a%5Cb"])
@pytest.mark.parametrize("where", ["/v1/weights/{}/a/0/1/f", "/v1/weights/a/{}/0/1/f", "/v1/weights/a/a/0/1/{}"])
def test_names_are_plain(http: httpx.Client, service: Service, name: str, where: str) -> None:
    with connected(http) as connection:  # httpx would resolve the dots
        target = where.format(name).encode().decode("latin-1")
        connection.sendall(head("PUT", target, "Content-Type: a/b", "Content-Length: 1") + b"a")
        assert answer(connection)[0] in (400, 404, 422)
    assert http.get("/livez").status_code == 200


def test_a_poll_ends_with_the_commit(http: httpx.Client, at: str) -> None:
    run = at.rpartition("/")[0]
    publish(http, f"{at}/0/9")
    newest = {"lineage": "first", "after": "0.9"}
    began = time.monotonic()
    assert http.get(run, params=newest | {"wait_seconds": 0.2}).status_code == 204
    assert time.monotonic() - began >= 0.2
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(http.get, run, params=newest | {"wait_seconds": 50})
        publish(http, f"{at}/0/10")
        assert poll.result().json()["version"] == 10
    assert http.get(run, params={"after": "0.10"}).status_code == 204
    assert http.get(run, params={"lineage": "other"}).status_code == 204
    assert http.get(run, params={"after": "x"}).status_code == 422


def test_a_poll_sees_what_another_server_commits(
    make_service: MakeService, serve: Serve, at: str, tmp_path: Path
) -> None:
    """Servers of one PostgreSQL queue may share the data directory."""
    service = make_service()
    other = make_service()
    other.config.data_dir.joinpath("weights").symlink_to(service.config.data_dir / "weights")
    with serve(service) as here, serve(other) as there:
        publish(here, f"{at}/0/1")
        run = at.rpartition("/")[0]
        assert there.get(run).json()["version"] == 1
        publisher = threading.Timer(0.1, lambda: publish(here, f"{at}/0/2"))
        publisher.start()
        assert there.get(run, params={"after": "0.1", "wait_seconds": 60}).json()["version"] == 2
        publisher.join()


def test_old_versions_are_removed_after_their_readers(
    http: httpx.Client, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "PAUSE_SECONDS", 0.0)
    large = {"model.safetensors": bytes(range(256)) * 2**15}  # more than fits into the sockets
    publish(http, f"{at}/0/1", large)
    with http.stream("GET", f"{at}/0/1/model.safetensors") as slow:
        chunks = slow.iter_bytes()
        got = next(chunks)
        for version in (2, 3):
            publish(http, f"{at}/0/{version}")
        assert http.get(f"{at}/0/1").status_code == 200
        assert got + b"".join(chunks) == large["model.safetensors"]
    publish(http, f"{at}/0/4")
    for path in ("", "/model.safetensors"):
        assert refusal(http.get(f"{at}/0/1{path}")) == (410, "gone", None)
    assert http.get(f"{at}/0/3").status_code == http.get(f"{at}/0/4/config.json").status_code == 200


def test_an_upload_that_breaks_off_leaves_nothing(http: httpx.Client, service: Service, at: str) -> None:
    staging = service.config.data_dir / "weights" / ".staging"
    with connected(http) as connection:
        start_upload(connection, at, 4 * 2**20, bytes(3 * 2**20))
        until(lambda: any(staging.rglob("parts/*")))
    until(lambda: not any(staging.rglob("parts/*")))
    assert put(http, f"{at}/0/1/file", b"a").status_code == 201


def test_an_early_refusal_reaches_a_client_that_still_sends(make_service: MakeService, serve: Serve, at: str) -> None:
    service = make_service()
    with serve(service) as http:
        service.drain()
        with connected(http) as connection:
            start_upload(connection, at, 2**30, bytes(2**20))
            status, text = answer(connection)
            assert status == 503
            assert b"connection: close" in text.lower()
            connection.sendall(bytes(2**16))


def test_a_body_that_stops_is_too_slow(http: httpx.Client, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ref_server.http.bodies.IDLE_SECONDS", 0.2)
    with connected(http) as connection:
        start_upload(connection, at, 9, b"ab")
        assert answer(connection)[0] == 408


def test_streams_share_the_memory_for_bodies(make_service: MakeService, serve: Serve, at: str) -> None:
    with serve(make_service(max_body_mib=1, max_bodies_mib=4)) as http:
        with connected(http) as first:
            start_upload(first, at, 9, b"ab")
            while (refused := put(http, f"{at}/0/1/other", b"a")).status_code == 201:
                pass
            assert refusal(refused) == (429, "busy", None)
        while put(http, f"{at}/0/1/other", b"a").status_code == 429:
            time.sleep(0.01)


def test_polls_of_one_client_are_limited(
    make_service: MakeService, serve: Serve, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "MAX_POLLS", 1)
    with serve(make_service()) as http:
        assert refusal(http.get(at.rpartition("/")[0])) == (429, "busy", None)


def test_polls_end_when_the_server_drains(make_service: MakeService, serve: Serve, at: str) -> None:
    service = make_service()
    with serve(service) as http:
        drain = threading.Timer(0.1, service.drain)
        drain.start()
        polled = http.get(at.rpartition("/")[0], params={"wait_seconds": 100})
        drain.join()
        assert refusal(polled) == (503, "not_ready", None)


def test_metrics(make_service: MakeService, serve: Serve, at: str) -> None:
    with serve(make_service()) as http:
        publish(http, f"{at}/0/1")
        http.get(f"{at}/0/1/model.safetensors")
        page = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if line[0] != "#")
    size = sum(map(len, FILES.values()))
    assert float(page["tandem_weights_received_bytes_total"]) == size
    assert float(page["tandem_weights_sent_bytes_total"]) == len(FILES["model.safetensors"])
    assert (float(page["tandem_weights_versions"]), float(page["tandem_weights_bytes"])) == (1, size)
