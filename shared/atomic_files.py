"""Atomic writes: a file or directory is complete or absent, even if its writer is killed or the disk is full.

Each is written under a temporary name in the same directory, synced, and renamed. Only one process may write a path at
a time, unless a function says otherwise; others may read it meanwhile.
"""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from shared.errors import UserError, printable

T = TypeVar("T")

# Prefixes of directories that are being written, and of those that are being removed.
_WRITTEN = ".tmp-"
_REMOVED = ".removed-"


def write_json(path: Path, value: object, *, mode: int = 0o666) -> None:
    """Writes a value as JSON, atomically."""
    write_text(path, json.dumps(value, indent=2), mode=mode)


def read_json(path: Path, kind: TypeAdapter[T], remedy: str) -> T:
    """Reads a file that write_json wrote. Raises OSError if it cannot be read, and UserError if it is damaged. remedy:
    what the error's message tells the user to do."""
    try:
        return kind.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{name}: " for name in first["loc"])
        raise UserError(f"{path} is damaged ({printable(where + first['msg'])})", remedy) from None


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Writes a text in UTF-8, atomically."""
    with atomic_file(path, mode=mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_file(target: Path, *, mode: int = 0o666, synced: bool = True) -> Generator[Path]:
    """Yields an empty temporary file to fill. It replaces `target` in one rename when the block ends without an error.

    After a power cut, `target` is either the old or the new file. Where it must be the new one, sync the directory too.

    mode: permissions of the new file, before the umask. synced: False saves the time of an fsync; a power cut may then
    leave an empty or truncated file, which readers must detect.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)  # a file that a killed writer left would keep its permissions
    with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
        made = os.fstat(file.fileno())
        try:
            yield temporary
            if temporary.stat().st_mode != made.st_mode:  # safetensors replaces it by a file that only the owner reads
                temporary.chmod(stat.S_IMODE(made.st_mode))
            if synced:
                sync(temporary)
            temporary.replace(target)
        except BaseException:
            if is_same_file(temporary, made):  # else another writer has begun
                temporary.unlink()
            raise


def is_same_file(path: Path, status: os.stat_result) -> bool:
    """Whether the path is still the file that this status was taken from."""
    try:
        return os.path.samestat(path.stat(), status)
    except FileNotFoundError:
        return False


@contextmanager
def atomic_directory(target: Path) -> Generator[Path]:
    """Yields a temporary directory to fill. It replaces `target` when the block ends, and then survives a power cut.

    Anything that a killed writer of `target` left behind is removed first; if it was killed between the two renames,
    the old directory is restored. Nothing else in the parent directory is touched.
    """
    temporary, replaced = target.with_name(f"{_WRITTEN}{target.name}"), target.with_name(f".replaced-{target.name}")
    if replaced.exists() and not target.exists():
        replaced.rename(target)
    for leftover in (temporary, replaced):
        _remove(leftover)
    new_parents = [parent for parent in target.parents if not parent.exists()]
    temporary.mkdir(parents=True)
    yield temporary
    _sync_all(temporary)
    if target.exists():  # a directory cannot replace another one, unless that is empty
        target.rename(replaced)
    try:
        temporary.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    for named in (target, *new_parents):
        sync(named.parent)
    _remove(replaced)


def keep_directory(parent: Path, write: Callable[[Path], object], name: Callable[[Path], str]) -> Path:
    """Creates a directory in `parent` and returns its path. Several processes may do so at once: the first one's stays.

    write: creates a directory at the path that it is given. name: returns the name for the directory at that path, such
    as a hash of its content.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=parent, prefix=".new-") as temporary:
        directory = Path(temporary, "content")
        write(directory)
        _sync_all(directory)
        kept = parent / name(directory)
        try:
            directory.rename(kept)
        except OSError:  # it exists already
            if not kept.is_dir():
                raise
    sync(parent)
    return kept


class VersionedDirectory:
    """Numbered versions of a directory in `root`, such as step-00000080. Each is complete or absent.

    Anything that a killed process left behind is removed when the next version is written.
    """

    def __init__(self, root: Path, name: str, *, needs: str = "") -> None:
        """name: a format of one or more numbers, the most significant first: `step-{0:08d}`, `{0:04d}-{1:08d}`.

        needs: a file that every version contains. A directory of such a name without it is not a version.
        """
        self._root = root
        self._name = name
        self._needs = needs
        self._pattern = re.compile(re.sub(r"\\{(\d):0\d+d\\}", r"(?P<n\1>[0-9]+)", re.escape(name)))

    def path(self, *numbers: int) -> Path:
        """Returns the path of a version, which need not exist."""
        return self._root / self._name.format(*numbers)

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """Parses a version's name. Returns None if it is not one."""
        match = self._pattern.fullmatch(name)
        numbers = tuple(int(match[f"n{place}"]) for place in range(self._pattern.groups)) if match else ()
        return numbers if match and self._name.format(*numbers) == name else None

    def by_numbers(self) -> dict[tuple[int, ...], Path]:
        """Returns the paths of the existing versions by their numbers, the newest last."""
        named = {numbers: path for path in self._root.glob("*") if (numbers := self.numbers(path.name)) is not None}
        return {numbers: named[numbers] for numbers in sorted(named) if (named[numbers] / self._needs).exists()}

    def newest(self) -> Path | None:
        return next(reversed(self.by_numbers().values()), None)

    @contextmanager
    def write(self, *numbers: int) -> Generator[Path]:
        """Yields a temporary directory to fill, which becomes the version, as in `atomic_directory`."""
        self.remove_leftovers()
        with atomic_directory(self.path(*numbers)) as temporary:
            yield temporary

    def remove_leftovers(self) -> None:
        """Removes what a killed process was writing or removing, as far as that is possible."""
        for path in self._root.glob(".*"):
            for kind in (_WRITTEN, _REMOVED):
                if path.name.startswith(kind) and self.numbers(path.name.removeprefix(kind)) is not None:
                    with suppress(OSError):  # harmless, unless it is in the new version's way: then writing fails
                        _remove(path)

    def remove_old(self, *, keep: int, also: Collection[Path] = ()) -> None:
        """Removes all versions but the newest `keep` and those whose paths are in `also`."""
        for path in [*self.by_numbers().values()][:-keep]:
            if path not in also:
                remove_directory(path)

    def remove_after(self, *last: int) -> None:
        """Removes the versions newer than this one, the newest first, so that a killed process leaves no gap."""
        for numbers, path in reversed(self.by_numbers().items()):
            if numbers > last:
                remove_directory(path)


def remove_directory(path: Path) -> None:
    """Removes a directory, renaming it first, so that it is complete or absent even if this process is killed."""
    removed = path.with_name(f"{_REMOVED}{path.name}")
    _remove(removed)  # a leftover of a killed process
    _remove(path.rename(removed))


def _remove(path: Path) -> None:
    """Removes a directory, file or link if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_all(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        sync(path)


def sync(path: Path) -> None:
    """Flushes a file's content, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
