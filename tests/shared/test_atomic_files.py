"""A file that is replaced is read as the old or the new one, wherever its writer is killed."""

import json
from itertools import count
from pathlib import Path
from typing import Any

from shared.atomic_files import whole_directory, write_json


def test_a_reader_never_sees_half_a_json_file(tmp_path: Path, fuse: Any) -> None:
    path = tmp_path / "value.json"
    write_json(path, {"value": "old"})
    for number in count(1):
        survived = fuse.lives(number, lambda: write_json(path, {"value": "new"}))
        assert json.loads(path.read_text())["value"] in ("old", "new")
        if survived:
            break
    assert json.loads(path.read_text()) == {"value": "new"}


def test_a_whole_directory_replaces_an_older_one(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with whole_directory(tmp_path / "model") as directory:
            (directory / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["model", "model/second"]
