"""`python -m tests.bench.counted_server FILE MS …`: ref-server, with every flush of SQLite counted in FILE.

Each flush also takes MS milliseconds longer than the disk needs, so that a fast disk can be measured as a slow one.
"""

import mmap
import sys
import time
from pathlib import Path

import apsw

from ref_server.__main__ import main

_BYTES = 8


class CountingDisk(apsw.VFS):
    """A VFS of SQLite that counts flushes. The count is in a file, where another process can read it at any time."""

    def __init__(self, path: Path, seconds: float) -> None:
        path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _BYTES)
        self.seconds = seconds
        super().__init__("counting-disk", "unix", makedefault=True)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> "_CountingFile":
        return _CountingFile(self, name, flags)

    def count(self) -> None:
        self._shared[:] = (int.from_bytes(self._shared[:], "little") + 1).to_bytes(_BYTES, "little")


class _CountingFile(apsw.VFSFile):
    def __init__(self, disk: CountingDisk, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        self._disk = disk
        super().__init__("unix", name, flags)

    def xSync(self, flags: int) -> None:
        self._disk.count()
        super().xSync(flags)
        if self._disk.seconds:
            time.sleep(self._disk.seconds)


def read_count(path: Path) -> int:
    return int.from_bytes(path.read_bytes(), "little")


if __name__ == "__main__":
    _disk = CountingDisk(Path(sys.argv[1]), float(sys.argv[2]) / 1000)
    sys.argv[1:] = sys.argv[3:]
    main()
