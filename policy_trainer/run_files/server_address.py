"""RUN_DIR/server.json: where the reference server listens that a trainer has started."""

import json
from pathlib import Path

from policy_trainer.run_files.atomic_files import write_json
from policy_trainer.run_files.run_directory import RunDirectory


def write_address(directory: RunDirectory, port: int) -> str:
    """Returns the server's URL. Workers of this machine read it, and the next trainer takes the same port again."""
    url = f"http://127.0.0.1:{port}"
    write_json(_file(directory), {"url": url, "port": port})
    return url


def read_url(directory: RunDirectory) -> str | None:
    """None if no trainer has started a server for this run."""
    return _read(directory).get("url")


def read_port(directory: RunDirectory) -> int | None:
    return _read(directory).get("port")


def _file(directory: RunDirectory) -> Path:
    return directory.root / "server.json"


def _read(directory: RunDirectory) -> dict:
    file = _file(directory)
    return json.loads(file.read_text()) if file.exists() else {}
