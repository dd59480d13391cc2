"""Limits the output of the user's code in separate processes: for each call, and for each process and minute."""

import codecs
import io
import os
import sys
import time
from contextlib import suppress
from typing import BinaryIO

from shared.errors import printable

# Characters at the end of a call's output that are kept.
_MOST_TAIL = 2000
# Bytes that are passed on of a call's output, and of a process's output in so many seconds.
_MOST_OF_CALL = 10_000
_MOST_OF_PROCESS, _SECONDS = 2**16, 60.0


class UserOutput:
    """Standard output and standard error during calls of users' code. A call may close or replace them or their
    descriptors: they are restored for the next call."""

    def __init__(self) -> None:
        self.descriptor = os.dup(2)
        self._tail = b""
        self._left = 0

    def begin(self) -> None:
        """To be called before each call. Raises OSError if the descriptors cannot be restored."""
        self._tail, self._left = b"", _MOST_OF_CALL
        for place in (1, 2):
            os.dup2(self.descriptor, place)
        sys.stdout = sys.__stdout__ = _stream(self, 1)
        sys.stderr = sys.__stderr__ = _stream(self, 2)

    @property
    def tail(self) -> str:
        """The end of this call's output."""
        return self._tail.decode(errors="replace")[-_MOST_TAIL:]

    def write(self, data: bytes) -> None:
        self._tail = (self._tail + data[-4 * _MOST_TAIL :])[-4 * _MOST_TAIL :]
        shown, self._left = _within(self._left, data, f"it printed more than {_MOST_OF_CALL} bytes in a call")
        _write(self.descriptor, shown)


class _Raw(io.RawIOBase):
    def __init__(self, output: UserOutput, descriptor: int) -> None:
        self._output = output
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        self._output.write(bytes(data))
        return len(data)


def _stream(output: UserOutput, descriptor: int) -> io.TextIOWrapper:
    raw: BinaryIO = _Raw(output, descriptor)  # type: ignore[assignment]
    return io.TextIOWrapper(raw, encoding="utf-8", errors="replace", write_through=True)


def pass_on(output: BinaryIO) -> None:
    """Copies to standard error what a process writes, until it and what it has started have ended.

    Control characters are escaped for a terminal. It goes on reading when standard error accepts no more, since the
    process would otherwise fail when it prints.
    """
    left, until = _MOST_OF_PROCESS, 0.0
    text = codecs.getincrementaldecoder("utf-8")(errors="replace") if os.isatty(2) else None
    with output:
        while data := os.read(output.fileno(), 2**16):
            if time.monotonic() >= until:
                left, until = _MOST_OF_PROCESS, time.monotonic() + _SECONDS
            limit = f"{_MOST_OF_PROCESS >> 10} KiB in {_SECONDS:g} s"
            shown, left = _within(left, data, f"tools or rewards wrote more than {limit}")
            if text:
                shown = printable(text.decode(shown), keep="\n\t").encode()
            with suppress(OSError):
                _write(2, shown)


def _within(left: int, data: bytes, excess: str) -> tuple[bytes, int]:
    """The data cut to `left` bytes, and how many bytes then remain: -1 once the excess was noted."""
    shown = data[: max(0, left)]
    if left >= 0 and len(data) > left:
        shown += f"\n[{excess}; the rest is left out]\n".encode()
    return shown, max(-1, left - len(data))


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
