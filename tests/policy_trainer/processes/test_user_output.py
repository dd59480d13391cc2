"""What a process of the user's code writes reaches standard error, whatever that is."""

import os
import pty
import socket
import threading
from pathlib import Path

import pytest

from policy_trainer.processes import user_output
from policy_trainer.processes.user_output import pass_on
from policy_trainer.processes.user_process import end_python, start_python


def passed_on(descriptor: int, data: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the descriptor as standard error. Each is written only once what precedes it was read."""
    real, is_terminal = user_output._write, os.isatty(descriptor)
    monkeypatch.setattr(user_output, "_write", lambda place, shown: real(descriptor, shown))
    monkeypatch.setattr(os, "isatty", lambda place: is_terminal)
    read, write = socket.socketpair()
    output = read.makefile("rb", buffering=0)
    thread = threading.Thread(target=pass_on, args=(output,))
    with read:
        thread.start()
        with write:
            for each in data:
                write.sendall(each)
        thread.join()


def test_it_reads_on_when_standard_error_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    passed_on(writer, [2**15 * b"x"] * 100, monkeypatch)  # more than a socket holds
    os.close(writer)


def test_a_terminal_gets_no_control_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, terminal = pty.openpty()
    passed_on(terminal, [b"\x1b[2Jgr", b"\xc3", b"\xbcn\n"], monkeypatch)
    assert os.read(ours, 100).decode() == "\\x1b[2Jgr\u00fcn\r\n"
    os.close(terminal)
    os.close(ours)


def test_what_a_process_wrote_last_has_arrived_when_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_with_error.py").write_text("raise ValueError('the last words')")
    monkeypatch.syspath_prepend(tmp_path)
    arrived, ended = bytearray(), threading.Event()

    def write_later(place: int, shown: bytes) -> None:
        ended.wait(0.3)  # the process has ended long ago
        arrived.extend(shown)

    monkeypatch.setattr(user_output, "_write", write_later)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = start_python("ends_with_error", theirs.fileno())
        process.wait(60)
        end_python(process)
    assert b"the last words" in arrived
