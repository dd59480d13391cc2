"""SIGHUP: tokens and certificates are read again; requests and leases go on."""

import os
import signal
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import trustme

from tests.harness.processes import until
from tests.harness.server import Server
from tests.ref_server.calls import Rollout, bearer, lease_key, upload

pytestmark = pytest.mark.slow

OLD, NEW = (bearer(f"{name}-0123456789abcdef") for name in ("old", "new"))


def until_logged(server: Server, text: str) -> None:
    until(lambda: text in server.output(), f"{text!r} in the log", server)


def renew(server: Server) -> None:
    server.popen.send_signal(signal.SIGHUP)


def write_pair(authority: trustme.CA, directory: Path, key_type: trustme.KeyType) -> None:
    made = authority.issue_cert("127.0.0.1", key_type=key_type)
    (directory / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    (directory / "key.pem").write_bytes(made.private_key_pem.bytes())


def test_tokens_are_read_again_and_leases_go_on(tmp_path: Path, rollout: Rollout) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("admin old-0123456789abcdef\n")
    with Server(None, tmp_path, "--token-file", str(tokens)) as server, ThreadPoolExecutor(1) as pool:
        http = server.http
        body = {"consumer": "c", "wait_seconds": 30}
        waiting = pool.submit(http.post, "/v1/batches/lease", json=body, headers=OLD)
        until(lambda: "tandem_http_requests_active 2.0" in http.get("/metrics", headers=OLD).text, "the poll", server)
        tokens.write_text("train new-0123456789abcdef name=night\n")
        renew(server)
        until_logged(server, "tokens: read again")
        assert http.get("/v1/queue", headers=OLD).status_code == 401
        assert upload(http, rollout(), **NEW).status_code == 201
        leased = waiting.result()  # requested with the old token, while it was valid
        settled = http.post("/v1/leases/ack", json={"leases": [lease_key(leased)]}, headers=NEW)
        assert settled.json()["results"][0]["outcome"] == "ok"

        tokens.write_text("nonsense\n")
        renew(server)
        until_logged(server, "tokens: cannot be read again, what was read before stays")
        assert "line 1: a token has at least 16 characters" in server.output()
        assert http.get("/v1/queue", headers=NEW).status_code == 200
        assert server.popen.poll() is None


@pytest.mark.parametrize("kinds", [("RSA", "ECDSA"), ("ECDSA", "RSA")])
def test_certificates_are_read_again(tmp_path: Path, kinds: tuple[str, str]) -> None:
    """Whatever their keys; a pair that does not fit leaves the old one."""
    old, new = trustme.CA(), trustme.CA()
    write_pair(old, tmp_path, trustme.KeyType[kinds[0]])
    pair = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with Server(None, tmp_path, *pair, tls=trusting(old)) as server:
        write_pair(new, tmp_path, trustme.KeyType[kinds[1]])
        renew(server)
        until_logged(server, "certificate: read again")
        assert server.http.get("/livez").status_code == 200  # on the connection that it had
        url = server.http.base_url.join("/livez")
        assert httpx.get(url, verify=trusting(new), trust_env=False).status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(url, verify=trusting(old), trust_env=False)

        (tmp_path / "key.pem").write_bytes(old.private_key_pem.bytes())
        renew(server)
        until_logged(server, "certificate: cannot be read again, what was read before stays")
        assert httpx.get(url, verify=trusting(new), trust_env=False).status_code == 200


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A token file that can be read once."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(path.write_text, "admin old-0123456789abcdef\n")
        yield path


def test_a_pipe_is_not_read_twice(tmp_path: Path, pipe: Path) -> None:
    with Server(None, tmp_path, "--token-file", str(pipe)) as server:
        renew(server)
        until_logged(server, "is a pipe, which can be read only once")
        assert server.http.get("/v1/queue", headers=OLD).status_code == 200


def test_a_server_with_nothing_to_read_again_ends_with_its_terminal(tmp_path: Path) -> None:
    with Server(None, tmp_path) as server:
        renew(server)
        assert server.popen.wait(60) == -signal.SIGHUP
