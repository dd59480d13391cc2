"""Small and unwritable file systems."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


class NeedsRoot(Exception):
    """This test mounts file systems and sets attributes of files, which needs root: run it as root, or leave it out."""


class SmallDisk:
    """A tmpfs at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._ballast = root / "ballast"

    def fill(self, *, leave: int = 0) -> None:
        """Fills the free space, except for `leave` bytes."""
        statistics = os.statvfs(self.root)
        with self._ballast.open("ab", buffering=0) as file, suppress(OSError):
            file.write(bytes(max(0, statistics.f_bavail * statistics.f_frsize - leave)))

    def clear(self) -> None:
        """Frees the space again."""
        self._ballast.unlink()

    def forbid_writing(self) -> None:
        """Remounts it read-only. The kernel refuses that while a file is open for writing."""
        _call("mount", "-o", "remount,ro", str(self.root))


@contextmanager
def small_disk(root: Path, size: int) -> Iterator[SmallDisk]:
    """A file system of `size` bytes while the block runs. Raises NeedsRoot."""
    _need_root()
    root.mkdir(parents=True, exist_ok=True)
    _call("mount", "-t", "tmpfs", "-o", f"size={size}", "tandem-chaos", str(root))
    try:
        yield SmallDisk(root)
    finally:
        _call("umount", "--lazy", str(root))  # lazy, since a killed process may still hold it


@contextmanager
def immutable(files: Sequence[Path]) -> Iterator[None]:
    """Makes the files unwritable while the block runs, also through open descriptors. Raises NeedsRoot."""
    _need_root()
    names = [str(file) for file in files]
    _call("chattr", "+i", *names)
    try:
        yield
    finally:
        _call("chattr", "-i", *names)


def _need_root() -> None:
    if os.geteuid() != 0:
        raise NeedsRoot(NeedsRoot.__doc__)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NeedsRoot(f"{' '.join(command)}: {done.stderr.strip()}")
