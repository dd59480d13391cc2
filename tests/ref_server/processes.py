"""A server as a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLContext

import httpx

from tests.ports import free_port

PATIENCE = 180.0


@dataclass(frozen=True)
class Running:
    """log: everything that the process has written."""

    process: subprocess.Popen[bytes]
    http: httpx.Client
    log: Path


@contextmanager
def running(directory: Path, *options: str, tls: SSLContext | None = None, **environment: str) -> Iterator[Running]:
    """`ref-server serve` with its data in `directory`, once it answers; killed when the block ends."""
    port, log = free_port(), directory / "log"
    command = [sys.executable, "-m", "ref_server", "serve", "--data-dir", str(directory / "data"), "--port", str(port)]
    url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *options], stdout=output, stderr=output, env={**os.environ, **environment}
        )
    try:
        with httpx.Client(base_url=url, timeout=60, verify=tls or True, trust_env=False) as http:
            deadline = time.monotonic() + PATIENCE
            while not _ready(http):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield Running(process, http, log)
    finally:
        process.kill()
        process.wait()


def _ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False
