"""Checks the certificate and key files of HTTPS."""

import ssl
from pathlib import Path


def check_pair(certificate: Path, key: Path) -> None:
    """Raises ValueError, naming the setting at fault, unless these PEM files can serve HTTPS together."""
    for name, file in (("tls_cert", certificate), ("tls_key", key)):
        try:
            file.read_bytes()
        except OSError as error:
            raise ValueError(f"{name}: {file} cannot be read: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(certificate)
    except ssl.SSLError:
        raise ValueError(f"tls_cert: {certificate} holds no certificate in PEM form") from None
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"tls_key: {key} is not the key of the certificate in {certificate}") from None
        raise ValueError(f"tls_key: {key} holds no key in PEM form without a password") from None


def _no_password() -> str:
    """An empty password, or OpenSSL would ask for one on the terminal."""
    return ""
