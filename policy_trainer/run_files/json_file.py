"""Small JSON files that other processes read, and that must survive a power cut."""

import json
import os
from pathlib import Path


def write_json(path: Path, value: object) -> None:
    """Replaces the file in one rename, and returns once it is on the disk. A reader sees the old or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
