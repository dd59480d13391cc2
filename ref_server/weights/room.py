"""Disk space for weights, published or being uploaded, and how much of it one token may use."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ref_server.queue.disk import disk_space
from ref_server.queue.errors import StorageFull

_MIB = 2**20
# A token may store so many times what stays free. If only one token stores anything, it gets three quarters.
_OF_TOKEN = 3
# The pause between two counts of what is on the disk, as a multiple of the last one's duration; at least a second.
_REST = 10.0


class Room:
    """Limits what is stored; thread-safe.

    count: returns the bytes on the disk by the token that they were uploaded with; '' for none. min_free: bytes of the
    disk that stay free; None: a default. most: bytes in all; None: what the disk has. most_of_token: bytes of one
    token; None: _OF_TOKEN times what stays free.
    """

    def __init__(
        self,
        root: Path,
        count: Callable[[], Counter[str]],
        *,
        min_free: int | None,
        most: int | None,
        most_of_token: int | None,
    ) -> None:
        self._root = root
        self._count = count
        self._min_free = min_free
        self._most = most
        self._most_of_token = most_of_token
        self._lock = threading.Lock()
        self._used: Counter[str] = Counter()
        self._fresh_until = 0.0

    def check(self, token: str, size: int) -> None:
        """Raises StorageFull unless `size` more bytes may be stored with this token."""
        with self._lock:
            self._check(token, size)

    def take(self, token: str, size: int) -> None:
        """As check, but the bytes count as stored until the next count of the disk."""
        with self._lock:
            self._check(token, size)
            self._used[token] += size

    def _check(self, token: str, size: int) -> None:
        self._recount()
        space = disk_space(self._root, self._min_free)
        free = space.free - space.floor
        if size > free:
            raise StorageFull(
                f"the disk is full: {_mib(space.free)} are free in {self._root}, and min_free_mib keeps "
                f"{_mib(space.floor)}; make room, or publish to another server"
            )
        if self._most is not None:
            free = min(free, self._most - self._used.total())
            if size > free:
                raise StorageFull(
                    f"{_mib(self._used.total())} of weights are stored, this is {_mib(size)} more and max_weights_mib "
                    f"is {_mib(self._most)}; wait until older versions are removed, or raise it"
                )
        if token:
            self._check_token(token, size, free)

    def _check_token(self, token: str, size: int, free: int) -> None:
        has = self._used[token] + size
        most = _OF_TOKEN * (free - size) if self._most_of_token is None else self._most_of_token
        if has > most:
            bound = f"{_OF_TOKEN} times what is free by default" if self._most_of_token is None else _mib(most)
            raise StorageFull(
                f"{_mib(has)} of weights would be stored with this token, published or not yet committed, but "
                f"max_weights_mib_per_token is {bound}; {_mib(free)} are free. Uploads that are not committed are "
                "removed after an hour; upload less, or raise the limit"
            )

    def _recount(self) -> None:
        began = time.monotonic()
        if began >= self._fresh_until:
            self._used = self._count()
            now = time.monotonic()
            self._fresh_until = now + max(1.0, _REST * (now - began))


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f} MiB"
