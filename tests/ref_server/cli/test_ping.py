"""`ref-server ping`: a server that is ready, one that is not, none at all, and one that refuses the client."""

import json
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
import trustme

from ref_server.service.service import Service
from tests.harness.ports import free_port
from tests.harness.server import Server

Command = Callable[..., tuple[int, str, str]]

TRAIN = "a-trainers-token-0123456789"
UPLOAD = "a-workers-token-0123456789"


def test_a_server_that_is_ready(command: Command, http: httpx.Client) -> None:
    url = str(http.base_url)
    status, out, err = command("ping", "--url", url)
    assert (status, err) == (0, "")
    pattern = rf"{re.escape(url)} is ready, \d+\.\d ms; model tiny, float32 on cpu, reference version 0\n"
    assert re.fullmatch(pattern, out)
    status, out, err = command("ping", "--url", url, "--json")
    printed = json.loads(out)
    assert (status, err, printed["ready"], printed["reason"], printed["url"]) == (0, "", True, None, url)
    assert printed["model"] == http.get("/v1/model").json()
    assert printed["milliseconds"] > 0
    assert command("ping", "--url", url, "--quiet") == (0, "", "")


def test_one_that_is_not(command: Command, make_service: Callable[..., Service], serve: Callable) -> None:
    service = make_service()
    with serve(service) as http:
        service.drain()
        url = str(http.base_url)
        for options in ([], ["--quiet"]):  # the server logs to the same standard output
            status, _, err = command("ping", "--url", url, *options)
            assert (status, err) == (1, f"ref-server ping: {url} is not ready: the server is shutting down\n")
        status, out, _ = command("ping", "--url", url, "--json")
        assert (status, json.loads(out[out.index("{\n") :])["reason"]) == (1, "the server is shutting down")


def test_none(command: Command) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    status, out, err = command("ping", "--url", url, "--wait", "0.5")
    assert (status, out) == (1, "")
    assert f"{url} is not ready: no server answers at {url}" in err


def test_waiting_ends_when_it_is_ready(
    command: Command, make_service: Callable[..., Service], serve: Callable[..., AbstractContextManager[httpx.Client]]
) -> None:
    service = make_service()
    with serve(service) as http:
        service.draining = True

        def recover() -> None:
            time.sleep(0.5)
            service.draining = False

        thread = threading.Thread(target=recover)
        thread.start()
        began = time.monotonic()
        status, out, _ = command("ping", "--url", str(http.base_url), "--wait", "60")
        thread.join()
    assert status == 0 and "is ready" in out
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--url localhost", "url: "),
        ("--wait -1", "wait: "),
        ("--token-file /nowhere", "/nowhere cannot be read"),
        ("--tls-ca /nowhere", "/nowhere cannot be read as certificates"),
    ],
)
def test_commands_that_cannot_be(command: Command, arguments: str, message: str) -> None:
    status, out, err = command("ping", *arguments.split())
    assert (status, out) == (2, "")
    assert message in err


def test_a_token_that_no_header_can_carry(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REF_SERVER_TOKEN", "two words")
    status, out, err = command("ping")
    assert (status, out) == (2, "")
    assert (
        err == "ref-server ping: token: must be made of letters, digits and - . _ ~ + / =, or no header can carry it\n"
    )


def test_help(command: Command) -> None:
    status, out, _ = command("ping", "--help")
    assert status == 0
    assert all(word in out for word in ("--wait", "--quiet", "--json", "--token-file", "REF_SERVER_TOKEN", "--tls-ca"))
    assert "SUPPRESS" not in out and "--token " not in out


@pytest.mark.slow
def test_a_server_with_tokens_and_tls(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """As processes: a server with a private authority, which describes its model to clients with a token."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    table = tmp_path / "tokens"
    table.write_text(f"# the first is used\ntrain {TRAIN} # gpu-2\nupload {UPLOAD}\n")
    context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    tls = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with Server(None, tmp_path, *tls, "--token-file", str(table), tls=context) as server:
        url = str(server.http.base_url)
        known = ("--url", url, "--tls-ca", str(tmp_path / "ca.pem"))
        status, out, err = command("ping", "--url", url)
        assert (status, out) == (1, "")
        assert "certificate does not verify" in err and "--tls-ca" in err
        status, out, _ = command("ping", *known)
        assert status == 0
        assert "its model is unknown: " in out and "--token-file, or REF_SERVER_TOKEN" in out
        status, out, _ = command("ping", *known, "--token-file", str(table))
        assert status == 0 and out.endswith("; a queue without a model\n")
        status, _, err = command("queue", "stats", *known)
        assert status == 1 and "REF_SERVER_TOKEN" in err
        status, _, err = command("queue", "requeue", "x", *known, "--token-file", str(table))
        assert status == 1 and "role admin" in err
        monkeypatch.setenv("REF_SERVER_TOKEN", UPLOAD)
        assert command("queue", "stats", *known)[0] == 0
        status, _, err = command("queue", "ls", *known)
        assert status == 1 and "role train" in err and TRAIN not in err
        process = subprocess.run(
            [sys.executable, "-m", "ref_server", "ping", *known], capture_output=True, text=True, timeout=300
        )
        assert process.returncode == 0 and process.stdout.endswith("; a queue without a model\n")
        assert TRAIN not in server.log.read_text() and UPLOAD not in server.log.read_text()
