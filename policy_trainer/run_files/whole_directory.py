"""Directories that are seen whole or not at all, and that survive a power cut."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """A directory to fill. It is synced and gets its name when the block ends; what was killed before goes here."""
    for leftover in target.parent.glob(".tmp-*"):
        shutil.rmtree(leftover)
    temporary = target.parent / f".tmp-{target.name}"
    temporary.mkdir(parents=True)
    yield temporary
    for file in (*temporary.rglob("*"), temporary):
        sync(file)
    temporary.rename(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Returns once a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
