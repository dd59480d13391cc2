"""The client over TLS: a private authority is trusted when it is named, and a failed verification is not retried."""

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme

from shared.api import ModelInfo
from shared.client import RefServerClient, Unreachable, Untrusted
from tests.site import Answer

Connect = Callable[..., Any]
OpenSite = Callable[..., Any]

MODEL = dict.fromkeys(ModelInfo.model_fields) | {"name": "m", "max_batch_tokens": 1000, "max_image_bytes": 0}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


@contextmanager
def serving(certificate: trustme.LeafCert) -> Iterator[str]:
    """A TLS server that answers with a model."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(MODEL).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that does not trust it breaks off

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    with Quiet(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_private_authority(connect: Connect, authority: trustme.CA, ca: Path) -> None:
    with serving(authority.issue_cert("127.0.0.1")) as url:
        assert connect(url, ca=ca).model().name == "m"


def test_one_that_is_not_known_is_not_waited_for(connect: Connect, authority: trustme.CA) -> None:
    with serving(authority.issue_cert("127.0.0.1")) as url:
        client = connect(url, patience=None)
        with pytest.raises(Untrusted, match="certificate does not verify: "):
            client.model()
        with pytest.raises(Untrusted):
            client.not_ready_reason()


def test_nor_is_a_certificate_of_another_name(connect: Connect, authority: trustme.CA, ca: Path) -> None:
    with serving(authority.issue_cert("elsewhere.example")) as url, pytest.raises(Untrusted):
        connect(url, ca=ca, patience=None).model()


def test_nor_is_a_server_that_speaks_no_tls(connect: Connect, open_site: OpenSite, ca: Path) -> None:
    url = open_site(lambda _: Answer(200, json.dumps(MODEL).encode())).url.replace("http:", "https:")
    with pytest.raises(Unreachable, match="does not speak TLS: the URL may have to begin with http://"):
        connect(url, ca=ca, patience=None).model()


def test_a_server_with_tls_that_is_asked_without(connect: Connect, authority: trustme.CA) -> None:
    refusal = pytest.raises(Unreachable, match="if it serves HTTPS, the URL begins with https://")
    with serving(authority.issue_cert("127.0.0.1")) as url, refusal as raised:
        connect(url.replace("https:", "http:"), patience=0).model()
    assert raised.value.passes, "one that was killed closes the connection, too"


def test_a_file_that_is_no_certificate(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    for name in ("empty.pem", "missing.pem"):
        with pytest.raises(ValueError, match=f"{name} cannot be read as certificates"):
            RefServerClient("https://127.0.0.1:1", ca=tmp_path / name)
