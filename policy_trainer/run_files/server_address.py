"""RUN_DIR/server.json: where the reference server listens that a trainer has started."""

import json
from pathlib import Path
from urllib.parse import urlsplit

from policy_trainer.run_files.run_directory import RunDirectory
from shared.atomic_files import write_json


def write_address(directory: RunDirectory, port: int) -> str:
    """Returns the server's URL. Workers of this machine read it, and the next trainer takes the same port again."""
    url = f"http://127.0.0.1:{port}"
    write_json(_file(directory), {"url": url})
    return url


def read_url(directory: RunDirectory) -> str | None:
    """None if no trainer has started a server for this run."""
    file = _file(directory)
    return json.loads(file.read_text()).get("url") if file.exists() else None


def read_port(directory: RunDirectory) -> int | None:
    url = read_url(directory)
    return urlsplit(url).port if url else None


def _file(directory: RunDirectory) -> Path:
    return directory.root / "server.json"
