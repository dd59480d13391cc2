"""The C library's memory allocator."""

import ctypes
import sys

# Larger blocks go back to the system when they are freed. Smaller ones are often needed again at once, by PyTorch too.
RETURNED_BYTES = 4 * 2**20
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def return_large_blocks() -> None:
    """Fixes a threshold that glibc otherwise raises to the largest block that was ever freed, and keeps blocks below.

    So a server that has once held many large bodies or answers would keep their memory. Other C libraries do not.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, RETURNED_BYTES)
