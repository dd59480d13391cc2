"""Requests written by hand, for what no HTTP library would send."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx


@contextmanager
def connected(http: httpx.Client) -> Iterator[socket.socket]:
    """A connection to the server of `http`."""
    with socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=60) as connection:
        yield connection


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and everything else, up to where the server closes the connection; status 0 when it says nothing."""
    received = rest(connection)
    return int(received.split(b" ", 2)[1]) if received else 0, received


def one_answer(connection: socket.socket) -> bytes:
    """The next answer on a connection that goes on."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1)
    length = re.search(rb"content-length: (\d+)", received.lower())
    end = received.index(b"\r\n\r\n") + 4 + (int(length[1]) if length else 0)
    while len(received) < end:
        received += connection.recv(end - len(received))
    return received


def rest(connection: socket.socket) -> bytes:
    """What still comes up to where the server closes the connection."""
    received = b""
    try:
        while chunk := connection.recv(65536):
            received += chunk
    except ConnectionResetError:  # it was closed while bytes of ours were on their way
        pass
    return received


def head(method: str, path: str, *headers: str) -> bytes:
    """The head of a request to a loopback name."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    return "".join(line + "\r\n" for line in [*lines, ""]).encode("latin-1")
