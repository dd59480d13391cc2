"""The disk of the embedded queue: a part of it stays free, so that what settles batches always has room."""

import os
from contextlib import suppress
from pathlib import Path

from ref_server.queue.errors import NoUnusedRoom, StorageFull
from ref_server.queue.records import DiskSpace

_MIB = 2**20
# By default this much stays free, or a twentieth of a small disk.
_MIN_FREE = 256 * _MIB
_PART = 20
_RESERVE = 2 * _MIB


class Disk:
    """The file system of `directory`. min_free: bytes that uploads leave free; None: a default; 0: uploads may fill it.

    Others may fill the disk, too. For that case a file holds a reserve, which `give_way` removes. It is made again when
    there is room.
    """

    def __init__(self, directory: Path, min_free: int | None) -> None:
        self._directory = directory
        self._reserve = directory / "queue.reserve"
        self._min_free = min_free
        self._floor = self.space.floor
        self._reserve_bytes = min(_RESERVE, self._floor // 4)
        self._refused = 0  # size of the last upload, if it was refused

    @property
    def space(self) -> DiskSpace:
        return disk_space(self._directory, self._min_free)

    def check(self, size: int, *, reusable: int = 0, owed: int = 0) -> None:
        """Raises StorageFull when an upload of `size` bytes leaves too little free: NoUnusedRoom if reusable is why.

        size 0 asks whether uploads are admitted: no while the last one would still be refused.
        reusable: bytes that are unused within the store's file, which never shrinks. They count for up to half of what
        stays free. owed: bytes by which the file will grow for what is in the write-ahead log. An upload is written
        twice: to the log, and from there to the file.
        """
        free = self.space.free
        wanted = size or self._refused
        without_file = free - owed - wanted - self._floor
        if without_file + min(reusable, self._floor // 2) - max(0, wanted - reusable) < 0:
            self._refused = wanted
            kind = NoUnusedRoom if without_file + self._floor // 2 >= 0 else StorageFull
            raise kind(
                f"the disk is full: {free / _MIB:,.1f} MiB are free in {self._directory}, and min_free_mib keeps "
                f"{self._floor / _MIB:,.1f} MiB for what settles batches; make room, or ack and drop batches"
            )
        self._refused = 0
        self.restore()

    def give_way(self) -> None:
        """Removes the reserve: the disk is full, and what makes room needs some."""
        with suppress(OSError):
            self._reserve.unlink()

    def give_way_if_full(self) -> None:
        """To be called before the store is opened: that needs a little room, too."""
        if self.space.free < self._reserve_bytes:
            self.give_way()

    def restore(self) -> None:
        """Makes the reserve, unless it exists or there is too little room."""
        if self._reserve.exists() or self.space.free - self._reserve_bytes < self._floor:
            return
        try:
            self._reserve.write_bytes(os.urandom(self._reserve_bytes))  # some file systems would compress zeros
        except OSError:
            self.give_way()


def disk_space(directory: Path, min_free: int | None) -> DiskSpace:
    """Of the file system of a directory that exists. min_free: as for `Disk`."""
    now = os.statvfs(directory)
    most = now.f_blocks * now.f_frsize // _PART
    return DiskSpace(free=now.f_bavail * now.f_frsize, floor=min(_MIN_FREE, most) if min_free is None else min_free)
