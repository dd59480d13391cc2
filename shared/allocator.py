"""What glibc's allocator does with freed memory. Other C libraries decide for themselves."""

import ctypes
from contextlib import suppress

# Parameters of mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM = 128 * 2**10  # glibc's own


def keep_freed_memory() -> None:
    """For models on the CPU: by default glibc returns large freed blocks to the system, which clears every page again
    at the next allocation, a quarter of the time of a small model's forward. Up to 512 MiB stay."""
    _set(mmap=32 * 2**20, trim=512 * 2**20)  # the largest threshold that glibc accepts


def return_freed_memory() -> None:
    """For servers without a model on the CPU: by default glibc raises its threshold to the largest block that was ever
    freed, and keeps those below it. So a server that once held many large bodies or answers would keep their memory."""
    _set(mmap=4 * 2**20, trim=_TRIM)


def _set(*, mmap: int, trim: int) -> None:
    with suppress(AttributeError, OSError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, mmap)
        libc.mallopt(_M_TRIM_THRESHOLD, trim)
