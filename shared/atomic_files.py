"""Atomic writes: a file or directory is synced and then renamed, so that it appears complete or not at all."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from shared.errors import UserError, printable

T = TypeVar("T")


def write_json(path: Path, value: object, *, mode: int = 0o666) -> None:
    """As write_text."""
    write_text(path, json.dumps(value, indent=2), mode=mode)


def read_json(path: Path, kind: TypeAdapter[T], remedy: str) -> T:
    """A file of write_json. Raises UserError for a damaged file, with this clause on what to do; OSError."""
    try:
        return kind.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{name}: " for name in first["loc"])
        raise UserError(f"{path} is damaged ({printable(where + first['msg'])}); {remedy}") from None


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replaces the file in one rename, after its bytes are on the disk. A reader sees the old or the new file.

    mode: permissions of the new file, less the umask.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # one left by a killed writer would keep its permissions
    with open(temporary, "w", encoding="utf-8", opener=partial(os.open, mode=mode)) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextmanager
def whole_directory(target: Path, *, siblings: str | None = None) -> Iterator[Path]:
    """A temporary directory to fill, which replaces `target`: it is synced and renamed to `target` when the block ends.

    What a killed writer of `target` left behind is removed first; if it was killed between the two renames, the old
    directory comes back. Nothing else in the parent directory is touched. siblings: a glob for the numbered ones that
    only this caller writes here; their leftovers are removed too.
    """
    temporary, replaced = target.with_name(f".tmp-{target.name}"), target.with_name(f".replaced-{target.name}")
    if replaced.exists() and not target.exists():
        replaced.rename(target)
    for leftover in (temporary, replaced, *(target.parent.glob(f".tmp-{siblings}") if siblings else ())):
        _remove(leftover)
    temporary.mkdir(parents=True)
    yield temporary
    for file in (*temporary.rglob("*"), temporary):
        sync(file)
    if target.exists():  # a directory can be renamed only to a name that is free, or to an empty one
        target.rename(replaced)
    temporary.rename(target)
    _remove(replaced)
    sync(target.parent)


def _remove(path: Path) -> None:
    """Removes a directory, a file or a link, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Returns once a file's bytes, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
