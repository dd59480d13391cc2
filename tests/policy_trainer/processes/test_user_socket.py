"""Sockets for the processes of one user: who can connect, where they are, what they leave behind."""

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from policy_trainer.processes.user_socket import UserSocket, connect

NOBODY = 65534
PYTHON = "/usr/bin/python3"  # every account may run it
CONNECT = """
import socket, sys
for line in sys.argv[1:]:
    try:
        socket.socket(socket.AF_UNIX).connect(line)
        print("connected")
    except OSError as error:
        print(type(error).__name__)
"""


def echo(client: socket.socket) -> None:
    while data := client.recv(100):
        client.sendall(data)


@pytest.fixture
def echoing() -> Iterator[UserSocket]:
    with closing(UserSocket(echo, "echo")) as server:
        yield server


def test_each_connection_is_answered(echoing: UserSocket) -> None:
    with connect(echoing.path) as first, connect(echoing.path) as second:
        for connection, text in ((second, b"2\n"), (first, b"1\n")):
            connection.sendall(text)
            assert connection.recv(10) == text


def test_a_refused_connection_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS refuses while too many others connect."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)  # and does not listen yet
        monkeypatch.setattr("time.sleep", lambda seconds: server.listen())
        connect(path).close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another account")
@pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason=f"there is no {PYTHON}")
def test_another_account_cannot_connect(echoing: UserSocket) -> None:
    for user, answer in ((NOBODY, "PermissionError"), (0, "connected")):
        command = [PYTHON, "-I", "-S", "-c", CONNECT, echoing.path]
        output = subprocess.check_output(command, user=user, group=user, extra_groups=[], text=True, cwd="/")
        assert output.split() == [answer]


def test_only_its_user_can_enter_the_directory(echoing: UserSocket) -> None:
    directory = Path(echoing.path).parent
    assert directory.stat().st_mode & 0o777 == 0o700 and directory.stat().st_uid == os.getuid()


def test_a_long_path_of_temporary_files_is_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("ü" * 50)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with closing(UserSocket(echo, "echo")) as server:
        assert Path(server.path).parents[1] == Path("/tmp")
        connect(server.path).close()
    assert not any(long.iterdir())


def test_nothing_is_left() -> None:
    with closing(UserSocket(echo, "echo")) as server:
        pass
    assert not Path(server.path).parent.exists()
    with pytest.raises(FileNotFoundError):
        connect(server.path)
