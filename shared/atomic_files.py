"""Files and directories that are whole or absent, wherever their writer is killed or a disk is full.

Each is written under a temporary name next to its place, synced, and renamed. Nothing has two writers at once, unless a
function says so; others may read meanwhile.
"""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from shared.errors import UserError, printable

T = TypeVar("T")

# What the names of directories begin with that are being written, and of versions that are being removed.
_WRITTEN = ".tmp-"
_REMOVED = ".removed-"


def write_json(path: Path, value: object, *, mode: int = 0o666) -> None:
    """Writes a value as `write_text` does a text."""
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
    """Writes a text as `whole_file` does a file."""
    with whole_file(path, mode=mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(target: Path, *, mode: int = 0o666, synced: bool = True) -> Iterator[Path]:
    """An empty temporary file to fill, which replaces `target` in one rename when the block ends without an error.

    A power cut leaves the old or the new file. Sync the directory, too, where it must be the new one.

    mode: permissions of the new file, less the umask. synced: False saves the time of a sync; then a power cut may
    leave a file that is empty or cut, which its readers have to recognise.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)  # one left by a killed writer would keep its permissions
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
    """Whether the file that had this status is still at the path."""
    try:
        return os.path.samestat(path.stat(), status)
    except FileNotFoundError:
        return False


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """A temporary directory to fill, which replaces `target` when the block ends: it survives a power cut then.

    What a killed writer of `target` left behind is removed first; if it was killed between the two renames, the old
    directory comes back. Nothing else in the parent directory is touched.
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
    if target.exists():  # a directory can be renamed only to a name that is free, or to an empty one
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
    """A directory with this name in `parent`; several processes may make it at once, and the first one's stays.

    write: makes a directory at a path. name: of the directory there, such as a hash of its content.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=parent, prefix=".new-") as temporary:
        directory = Path(temporary, "content")
        write(directory)
        _sync_all(directory)
        kept = parent / name(directory)
        try:
            directory.rename(kept)
        except OSError:  # it is there
            if not kept.is_dir():
                raise
    sync(parent)
    return kept


class VersionedDirectory:
    """Numbered versions of a directory below `root`, such as step-00000080. Each is whole or absent.

    What a killed process left of others goes when the next version is written.
    """

    def __init__(self, root: Path, name: str, *, needs: str = "") -> None:
        """name: a format of numbers, the one that decides about age first: `step-{0:08d}`, `{0:04d}-{1:08d}`.

        needs: a file without which a directory of such a name is no version, because something else has made it.
        """
        self._root = root
        self._name = name
        self._needs = needs
        self._pattern = re.compile(re.sub(r"\\{(\d):0\d+d\\}", r"(?P<n\1>[0-9]+)", re.escape(name)))

    def path(self, *numbers: int) -> Path:
        """Where a version is, or would be."""
        return self._root / self._name.format(*numbers)

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """The numbers of a version of this name; None if no version has it."""
        match = self._pattern.fullmatch(name)
        numbers = tuple(int(match[f"n{place}"]) for place in range(self._pattern.groups)) if match else ()
        return numbers if match and self._name.format(*numbers) == name else None

    def by_numbers(self) -> dict[tuple[int, ...], Path]:
        """The versions by their numbers, the newest last."""
        named = {numbers: path for path in self._root.glob("*") if (numbers := self.numbers(path.name)) is not None}
        return {numbers: named[numbers] for numbers in sorted(named) if (named[numbers] / self._needs).exists()}

    def newest(self) -> Path | None:
        return next(reversed(self.by_numbers().values()), None)

    @contextmanager
    def write(self, *numbers: int) -> Iterator[Path]:
        """A temporary directory to fill, which becomes the version as in `whole_directory`."""
        self.remove_leftovers()
        with whole_directory(self.path(*numbers)) as temporary:
            yield temporary

    def remove_leftovers(self) -> None:
        """Removes what a killed process was writing or removing, as far as that is possible."""
        for path in self._root.glob(".*"):
            for kind in (_WRITTEN, _REMOVED):
                if path.name.startswith(kind) and self.numbers(path.name.removeprefix(kind)) is not None:
                    with suppress(OSError):  # the new version does not need it to go, unless it is in its place
                        _remove(path)

    def remove_old(self, *, keep: int, also: Collection[Path] = ()) -> None:
        """Removes all but the newest `keep` versions and those at the paths `also`."""
        for path in [*self.by_numbers().values()][:-keep]:
            if path not in also:
                remove_directory(path)

    def remove_after(self, *last: int) -> None:
        """Removes the versions that are newer than this one, the newest first: a killed process leaves no gap."""
        for numbers, path in reversed(self.by_numbers().items()):
            if numbers > last:
                remove_directory(path)


def remove_directory(path: Path) -> None:
    """Renames a directory before its files go, so that it is whole or absent wherever this process is killed."""
    removed = path.with_name(f"{_REMOVED}{path.name}")
    _remove(removed)  # left by a killed process
    _remove(path.rename(removed))


def _remove(path: Path) -> None:
    """Removes a directory, a file or a link, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_all(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        sync(path)


def sync(path: Path) -> None:
    """Returns once a file's bytes, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
