"""uvicorn's configuration, and the checks of address and open files before it starts."""

import errno
import resource
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ref_server.config import ServeConfig
from ref_server.http.gate.connections import Connection
from ref_server.http.gate.guard import MAX_HEADER_BYTES, MAX_URL_BYTES

# Files and connections that may be open at once, where the machine allows it. The usual 1,024 are too few.
OPEN_FILES = 65_536


def uvicorn_config(app: ASGIApp, config: ServeConfig, **changes: Any) -> uvicorn.Config:
    """changes: other arguments of uvicorn.Config; they override those set here."""
    settings = {
        "host": config.host,
        "port": config.port,
        "http": Connection,
        "ws": "none",
        "ssl_certfile": config.tls_cert,
        "ssl_keyfile": config.tls_key,
        "h11_max_incomplete_event_size": MAX_URL_BYTES + MAX_HEADER_BYTES,
        "log_config": None,  # uvicorn logs to our handlers
        "log_level": "warning",
        "access_log": False,
        "proxy_headers": False,  # anybody can write these headers
        "timeout_graceful_shutdown": 10,
        "timeout_keep_alive": 60,  # longer than clients keep a connection, so that no connection closes under a request
    }
    return uvicorn.Config(app, **(settings | changes))  # type: ignore[arg-type]


def check_address(host: str, port: int) -> None:
    """Raises OSError, naming the address, if it cannot be listened on. Call it before a model is loaded for minutes."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as asyncio does
                probe.bind(address)
    except OSError as error:
        # Other errors are left to asyncio, which listens where one of several addresses works.
        if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise OSError(f"{host} port {port}: {str(error.strerror).lower()}") from error


def allow_many_connections() -> None:
    """Raises the process's limit of open files: at the limit it can neither accept a request nor write to the store."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
