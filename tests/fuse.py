"""Crashes on demand: after the first file operation, after the second, and so on."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Crash(BaseException):
    """The process is gone."""


class Fuse:
    """Crashes a process after a given number of file operations."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.crash = Crash
        self.dead = False

    def burn(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left <= 0:
                self.left = None
                self.dead = True
                raise Crash

    def lives(self, operations: int, work: Callable[[], object]) -> bool:
        """Whether the work finished before the crash."""
        self.left = operations
        try:
            work()
        except Crash:
            return False
        finally:
            self.dead = False
        self.left = None
        return True


@pytest.fixture
def fuse(monkeypatch: pytest.MonkeyPatch) -> Fuse:
    """Burns after each file operation. A file that is opened for writing is empty when the crash comes.

    After the crash nothing is cleaned up: each operation of a handler crashes, too.
    """
    made = Fuse()

    def burning(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if made.dead:
                raise Crash
            result = operation(*args, **kwargs)
            if operation.__name__ != "open" or "w" in (args[1] if len(args) > 1 else kwargs.get("mode", "r")):
                try:
                    made.burn()
                except Crash:
                    if operation.__name__ == "open":
                        result.close()
                    raise
            return result

        return run

    for name in ("open", "write_bytes", "write_text", "replace", "rename", "unlink", "mkdir"):
        monkeypatch.setattr(Path, name, burning(getattr(Path, name)))

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        """File by file."""
        if ignore_errors and not path.exists():
            return
        for file in sorted(Path(path).rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        path.rmdir()

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    return made
