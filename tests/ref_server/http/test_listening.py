"""Listening sockets, and how many connections each peer may hold."""

import os
import resource
import socket
import ssl
import subprocess
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from ref_server.access.shares import Shares
from ref_server.config import ServeConfig
from ref_server.http import server as module
from ref_server.http.listening import CannotListen, Listener, listening
from ref_server.http.server import uvicorn_config
from tests.harness.ports import free_port
from tests.harness.processes import until
from tests.ref_server.serving import serving
from tests.ref_server.sockets import head, one_answer, rest

GET = head("GET", "/")


def serve(most: int, **settings: Any) -> AbstractContextManager[int]:
    """The port of a server that holds at most so many connections."""
    config = uvicorn_config(PlainTextResponse("ok"), ServeConfig(no_model=True), lifespan="off", **settings)
    return serving(config, Listener(socket.AF_INET, ("127.0.0.1", 0), Shares(most)))


def connected(port: int, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(source, 0))


def answers(connection: socket.socket) -> bool:
    """Whether a request on it is answered; False: the server closes it."""
    try:
        connection.sendall(GET)
        return bool(rest(connection) if connection.recv(1, socket.MSG_PEEK) == b"" else one_answer(connection))
    except OSError:
        return False


def test_a_peer_cannot_take_all_connections() -> None:
    with serve(most=10) as port, ExitStack() as stack:
        greedy = [stack.enter_context(connected(port, "127.0.0.2")) for _ in range(30)]
        assert sum(map(answers, greedy)) == 5
        modest = stack.enter_context(connected(port))
        assert answers(modest)


def test_a_connection_gives_its_place_back() -> None:
    with serve(most=2) as port:
        for _ in range(20):
            with connected(port) as connection:
                connection.sendall(head("GET", "/", "Connection: close"))
                assert rest(connection).endswith(b"ok")


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, str]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -keyout {key} -out {cert}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return {"ssl_certfile": str(cert), "ssl_keyfile": str(key)}


def test_a_handshake_counts_and_ends(monkeypatch: pytest.MonkeyPatch, certificate: dict[str, str]) -> None:
    monkeypatch.setattr(module, "HEAD_SECONDS", 1.0)
    context = ssl.create_default_context(cafile=certificate["ssl_certfile"])
    with serve(most=4, **certificate) as port, ExitStack() as stack:
        silent = [stack.enter_context(connected(port)) for _ in range(2)]
        with connected(port) as late:
            assert rest(late) == b""
        assert [rest(connection) for connection in silent] == [b"", b""]
        with context.wrap_socket(connected(port), server_hostname="localhost") as connection:
            connection.sendall(GET)
            assert b"200 OK" in connection.recv(1000)


@pytest.mark.parametrize("read", [1, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tls", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_end_that_nobody_reads_holds_no_place(
    monkeypatch: pytest.MonkeyPatch, certificate: dict[str, str], tls: bool, read: int
) -> None:
    """The application has answered, and the end lies in buffers. read: bytes that the client takes at a time."""
    monkeypatch.setattr(module, "LAST_SECONDS", 0.5)
    config = uvicorn_config(
        PlainTextResponse(bytes(2**23)), ServeConfig(no_model=True), lifespan="off", timeout_keep_alive=1,
        **(certificate if tls else {}),
    )  # fmt: skip
    listener = Listener(socket.AF_INET, ("127.0.0.1", 0), Shares(2))
    with serving(config, listener) as port, socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        plain.connect(("127.0.0.1", port))
        context = ssl.create_default_context(cafile=certificate["ssl_certfile"])
        with context.wrap_socket(plain, server_hostname="localhost") if tls else plain as slow:
            slow.sendall(GET)
            assert slow.recv(1)
            slow.settimeout(0.01)

            def has_place() -> bool:
                with suppress(OSError):
                    slow.recv(read)
                time.sleep(0.05)
                return listener.connections.take("127.0.0.1")

            assert not has_place()
            until(has_place, seconds=20)  # asyncio by itself would wait for 30 s for the end of TLS


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "connections"),
    [
        (128, 128, 128, 64),
        (256, 4096, 4096, 3840),
        (1024, resource.RLIM_INFINITY, 65_536, 65_280),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 65_280),
    ],
)
def test_connections_leave_files_for_the_store(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None, connections: int
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    with listening(ServeConfig(no_model=True, port=free_port())) as (listener,):
        assert listener.connections.most == connections
    assert limits[-1][0] == (soft if raised is None else raised)


def test_a_socket_of_the_parent_process_is_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as parents:
        port = parents.getsockname()[1]
        config = ServeConfig(no_model=True, port=port, fd=os.dup(parents.fileno()))
        with connected(port) as early, listening(config) as (listener,):
            app = uvicorn_config(PlainTextResponse("ok"), config, lifespan="off")
            with serving(app, listener):
                assert answers(early)
        with connected(port):
            pass  # the parent still listens


def test_a_file_descriptor_of_something_else_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.2", 0)) as other, (tmp_path / "file").open("w") as file:
        port = other.getsockname()[1]
        for fd, why in ((os.dup(other.fileno()), "listens at .*127.0.0.2"), (file.fileno(), "non-socket")):
            with (
                pytest.raises(CannotListen, match=f"file descriptor {fd}.*{why}"),
                listening(ServeConfig(no_model=True, port=port, fd=fd)),
            ):
                pass


@pytest.mark.parametrize(("host", "why"), [("127.0.0.1", "in use"), ("nowhere.invalid", ""), ("192.0.2.1", "assign")])
def test_an_unusable_address_is_named(host: str, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(CannotListen, match=f"{host} port {port}: .*{why}"),
            listening(ServeConfig(no_model=True, insecure=True, host=host, port=port)),
        ):
            pass


def test_another_process_was_faster_to_listen() -> None:
    """While the model was loaded: both could bind the address, since neither was listening."""
    config = ServeConfig(no_model=True, port=free_port())
    with listening(config) as (late,), listening(config) as (early,):
        early.listen()
        with pytest.raises(CannotListen, match=f"127.0.0.1 port {config.port}: .*in use"):
            late.listen()
