"""A file that is replaced is read as the old or the new one, wherever its writer is killed."""

import json
import os
import stat
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

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


def test_everything_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()

    def checked(move: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def moved(self: Path, target: Path) -> Path:
            assert {path.stat().st_ino for path in (self, *self.rglob("*"))} <= synced
            return move(self, target)

        return moved

    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, checked(getattr(Path, name)))
    write_json(tmp_path / "value.json", {"value": 1})
    with whole_directory(tmp_path / "model") as directory:
        (directory / "weights").write_text("1")
    assert tmp_path.stat().st_ino in synced, "the name of the directory, too"


def test_a_private_file_is_private_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    for left in (path, tmp_path / ".value.json.tmp"):  # an older version's, and a killed writer's
        left.touch()
        left.chmod(0o644)
    with (tmp_path / ".value.json.tmp").open() as reader:
        write_json(path, {}, mode=0o600)
        assert reader.read() == ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_whole_directory_replaces_an_older_one(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with whole_directory(tmp_path / "model") as directory:
            (directory / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["model", "model/second"]


def test_what_others_keep_in_the_parent_directory_stays(tmp_path: Path) -> None:
    kept = [tmp_path / ".tmp-directory-of-another-program", tmp_path / ".tmp-step-9"]
    for directory in kept:
        directory.mkdir()
    (tmp_path / ".tmp-file").write_text("another program's")
    with whole_directory(tmp_path / "model") as directory:
        (directory / "weights").touch()
    assert all(directory.is_dir() for directory in kept)
    assert (tmp_path / ".tmp-file").read_text() == "another program's"


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-7").mkdir()
    (tmp_path / ".tmp-step-8").write_text("a file by that name")
    with whole_directory(tmp_path / "step-8", siblings="step-*") as directory:
        (directory / "weights").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["step-8"]


def test_wherever_its_writer_is_killed_the_old_or_the_new_directory_is_there_after_the_next(
    tmp_path: Path, fuse: Any
) -> None:
    target = tmp_path / "model"

    def write(content: str) -> None:
        with whole_directory(target) as directory:
            (directory / "weights").write_text(content)

    def fail() -> None:
        with whole_directory(target):
            raise KeyboardInterrupt

    number = 0
    write("0")
    for number in count(1):
        survived = fuse.lives(number, partial(write, str(number)))
        with pytest.raises(KeyboardInterrupt):
            fail()
        assert (target / "weights").read_text() in (str(number - 1), str(number))
        write(str(number))
        if survived:
            break
    assert number > 3  # killed between the two renames, among others
