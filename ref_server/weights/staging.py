"""Files of a version on their way: received in parts, kept whole with their digests, and not visible yet."""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from ref_server.weights.errors import WeightsConflict, WrongDigest, disk_failures
from shared.api import WeightsFile
from shared.atomic_files import write_text

# Disk space that a file takes in addition to its content: its digest and its share of directories.
FILE_BYTES = 16 * 1024


class Staging:
    """The directory of one version that is not committed: `files` are whole, with their `digests`; `parts` arrive.

    A file counts once its digest is there, which is written after it. No method is for two threads at once, except
    `ArrivingFile.write`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = directory / "files"
        self._digests = directory / "digests"
        self._parts = directory / "parts"
        self._token = directory / "token"

    def begin(self, token: str, take_room: Callable[[int], None]) -> "ArrivingFile":
        """A new part. token: name of the uploader's token, to which the whole version is charged from now on.

        take_room: reserves so many bytes more; raises if there is no room for them.
        """
        for needed in (self.files, self._digests, self._parts):
            needed.mkdir(parents=True, exist_ok=True)
        if self.token != token:
            write_text(self._token, token)
        return ArrivingFile(self._parts / uuid4().hex, take_room)

    @property
    def token(self) -> str:
        """Name of the token that was used last; empty without one."""
        try:
            return self._token.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return ""

    @property
    def bytes(self) -> int:
        """Space on the disk. Each file takes a few blocks, however short it is."""
        arrived = [path for folder in (self.files, self._parts) for path in folder.glob("*")]
        return sum(_size(path) + FILE_BYTES for path in arrived) + FILE_BYTES

    def keep(self, file: str, part: "ArrivingFile") -> bool:
        """Makes a whole part the file. False if it is there already. Raises WeightsConflict for other content."""
        known = self.complete().get(file)
        if known is not None:
            check_same(file, known, part.content)
            return False
        part.path.replace(self.files / file)
        write_text(self._digests / file, part.content.model_dump_json())
        return True

    def complete(self) -> dict[str, WeightsFile]:
        """The files that are complete. After a power cut a digest may be damaged, or lack its file."""
        digests = [path for path in _inside(self._digests) if not path.name.startswith(".")]  # a dot: being written
        known = {path.name: content for path in digests if (content := _read_digest(path))}
        return {file: content for file, content in known.items() if has_size(self.files / file, content.bytes)}

    def sweep(self, seconds: float) -> None:
        """Removes parts of dead processes, and all of it when it was not touched for so long."""
        for path in _inside(self._parts):
            if _is_nobodys(path):
                path.unlink(missing_ok=True)
        touched = (self._digests, self._parts, *_inside(self._parts))
        if all(time.time() - _touched(path) > seconds for path in touched):
            shutil.rmtree(self.directory, ignore_errors=True)


class ArrivingFile:
    """A file that is arriving, locked meanwhile: a killed process leaves an unlocked one. Discard it at the end."""

    def __init__(self, path: Path, take_room: Callable[[int], None]) -> None:
        self.path = path
        self._take_room = take_room
        self._digest = hashlib.sha256()
        self._size = 0
        self._file = path.open("wb")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def discard(self) -> None:
        """Closes it, and removes what was not kept."""
        with suppress(OSError):  # a full disk cannot take what is still in the buffer
            self._file.close()
        self.path.unlink(missing_ok=True)

    @property
    def content(self) -> WeightsFile:
        return WeightsFile(bytes=self._size, sha256=self._digest.hexdigest())

    def write(self, data: bytes) -> None:
        """Raises StorageFull, StorageBroken."""
        with disk_failures():
            self._take_room(len(data))
            self._file.write(data)
        self._digest.update(data)
        self._size += len(data)

    def finish(self, sha256: str | None) -> None:
        """Returns once all bytes are on the disk. Raises WrongDigest; None: any content."""
        if sha256 not in (None, self.content.sha256):
            raise WrongDigest(f"the body has SHA-256 {self.content.sha256}, and its Content-Digest says {sha256}")
        self._file.flush()
        os.fsync(self._file.fileno())


def check_same(file: str, known: WeightsFile, content: WeightsFile) -> None:
    """Raises WeightsConflict."""
    if known != content:
        raise WeightsConflict(f"{file} is there with SHA-256 {known.sha256}, and this one has {content.sha256}")


def _read_digest(path: Path) -> WeightsFile | None:
    """None if it is damaged: the file has to be uploaded again."""
    try:
        return WeightsFile.model_validate_json(path.read_bytes())
    except ValueError:
        return None


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _touched(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _is_nobodys(path: Path) -> bool:
    """Whether the process that wrote a part is gone."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    return True
