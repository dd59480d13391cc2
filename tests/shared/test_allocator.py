"""Memory that was freed, in a process of its own."""

import platform
import subprocess
import sys

import pytest

# Frees forty blocks of 8 MiB in a thread, among small ones that stay, and says how many MiB are left of them.
CODE = """
import threading
from pathlib import Path
from shared.allocator import return_freed_memory
return_freed_memory()

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20

def work():
    for _ in range(2):
        large = []
        for number in range(40):
            large.append(bytearray(b"x") * (8 * 2**20))
            kept.append(bytes([number % 7]) * 100_000)
        del large

kept, before = [], resident()
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or not sys.platform.startswith("linux"), reason="of glibc alone")
def test_large_blocks_go_back_to_the_system() -> None:
    left = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=300).stdout
    assert int(left) < 40
