"""Atomic writes: a file or directory is synced and then renamed, so that it appears complete or not at all."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_json(path: Path, value: object) -> None:
    """As write_text."""
    write_text(path, json.dumps(value, indent=2))


def write_text(path: Path, text: str) -> None:
    """Replaces the file in one rename, after its bytes are on the disk. A reader sees the old or the new file."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """A temporary directory to fill, which replaces `target`: it is synced and renamed to `target` when the block ends.

    Directories that killed writers left behind are removed first.
    """
    for leftover in target.parent.glob(".tmp-*"):
        shutil.rmtree(leftover)
    temporary = target.parent / f".tmp-{target.name}"
    temporary.mkdir(parents=True)
    yield temporary
    for file in (*temporary.rglob("*"), temporary):
        sync(file)
    if target.exists():  # a directory can be renamed only to a name that is free, or to an empty one
        target.rename(target.parent / f".tmp-old-{target.name}")
    temporary.rename(target)
    shutil.rmtree(target.parent / f".tmp-old-{target.name}", ignore_errors=True)
    sync(target.parent)


def sync(path: Path) -> None:
    """Returns once a file's bytes, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
