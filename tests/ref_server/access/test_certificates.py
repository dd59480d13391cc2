"""HTTPS, with a private authority."""

import re
import ssl
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from ref_server.config import ServeConfig
from tests.harness.server import Server
from tests.ref_server.sockets import answer, connected, head


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`cert.pem`, `key.pem`, the key of another certificate, the key with a password, and no PEM at all."""
    directory = tmp_path_factory.mktemp("tls")
    certificate, other = authority.issue_cert("localhost", "127.0.0.1"), authority.issue_cert("other.example")
    (directory / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    (directory / "key.pem").write_bytes(certificate.private_key_pem.bytes())
    (directory / "other-key.pem").write_bytes(other.private_key_pem.bytes())
    key = load_pem_private_key(certificate.private_key_pem.bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password"))
    (directory / "locked-key.pem").write_bytes(locked)
    (directory / "garbage.pem").write_bytes(b"garbage")
    return directory


@pytest.mark.parametrize(
    ("cert", "key", "message"),
    [
        ("cert.pem", None, "tls_cert and tls_key go together"),
        (None, "key.pem", "tls_cert and tls_key go together"),
        ("none.pem", "key.pem", "tls_cert: {files}/none.pem cannot be read: No such file"),
        ("cert.pem", "none.pem", "tls_key: {files}/none.pem cannot be read: No such file"),
        ("cert.pem", ".", "tls_key: {files} cannot be read: Is a directory"),
        ("garbage.pem", "key.pem", "tls_cert: {files}/garbage.pem holds no certificate"),
        ("key.pem", "key.pem", "tls_cert: {files}/key.pem holds no certificate"),
        ("cert.pem", "garbage.pem", "tls_key: {files}/garbage.pem holds no key"),
        ("cert.pem", "cert.pem", "tls_key: {files}/cert.pem holds no key"),
        ("cert.pem", "locked-key.pem", "tls_key: {files}/locked-key.pem holds no key in PEM form without a password"),
        ("cert.pem", "other-key.pem", "tls_key: {files}/other-key.pem is not the key of the certificate"),
    ],
)
def test_files_that_cannot_serve(files: Path, cert: str | None, key: str | None, message: str) -> None:
    given = {"tls_cert": cert and files / cert, "tls_key": key and files / key}
    with pytest.raises(ValueError, match=re.escape(message.format(files=files))):
        ServeConfig.model_validate({"no_model": True, **given})


@pytest.mark.slow
def test_https(authority: trustme.CA, files: Path, tmp_path: Path) -> None:
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    pair = ("--tls-cert", str(files / "cert.pem"), "--tls-key", str(files / "key.pem"))
    with Server(None, tmp_path, *pair, tls=trusting) as server:
        assert server.http.get("/v1/queue").status_code == 200
        assert server.http.get("/livez", headers={"Host": "evil.example"}).status_code == 403
        own_page = {"Host": "localhost:8400", "Origin": "https://localhost:8400"}
        assert server.http.get("/v1/queue", headers=own_page).status_code == 200

        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(server.http.base_url.join("/livez"), trust_env=False)
        with connected(server.http) as connection:  # in the clear
            connection.sendall(head("GET", "/livez"))
            assert answer(connection)[0] == 0
        assert server.http.get("/livez").status_code == 200
        assert f"url={str(server.http.base_url).rstrip('/')}" in server.output()
        assert "Traceback" not in server.output()
