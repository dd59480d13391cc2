"""Reads tokens and certificates again while the server runs. Connections, requests and leases go on."""

import ssl
from collections.abc import Callable
from pathlib import Path

import structlog

from ref_server.access.certificates import check_pair
from ref_server.config import ServeConfig

log = structlog.get_logger()


def is_renewable(config: ServeConfig) -> bool:
    """Whether tokens or a certificate come from files."""
    return config.token_file is not None or config.tls_cert is not None


def renew(config: ServeConfig, tls: ssl.SSLContext | None) -> None:
    """Takes the tokens and the certificate that the files hold now. If a file is invalid, the current ones stay.

    tls: the context of the listening sockets; new connections are given the new certificate.
    """
    if config.token_file is not None:
        _try("tokens", [config.token_file], config.read_tokens)
    if config.tls_cert is not None and config.tls_key is not None and tls is not None:
        certificate, key = config.tls_cert, config.tls_key

        def load() -> None:
            check_pair(certificate, key)
            # Loaded into the same context, a certificate with another kind of key would be kept next to the old one.
            new = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            new.load_cert_chain(certificate, key)
            tls.sni_callback = lambda connection, name, context: setattr(connection, "context", new)

        _try("certificate", [certificate, key], load)


def _try(what: str, files: list[Path], read: Callable[[], None]) -> None:
    names = ", ".join(map(str, files))
    try:
        for file in files:
            if file.exists() and not file.is_file():
                raise ValueError(f"{file} is a pipe, which can be read only once: restart the server, or use a file")
        read()
    except (ValueError, OSError) as error:
        log.error(f"{what}: cannot be read again, what was read before stays", files=names, error=str(error))
    else:
        log.info(f"{what}: read again", files=names)
