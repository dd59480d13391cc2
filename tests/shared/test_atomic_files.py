"""Files and directories are the old or the new ones, wherever their writer is killed or the disk is full."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from shared.atomic_files import VersionedDirectory, atomic_directory, atomic_file, remove_directory, write_json


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
    with atomic_directory(tmp_path / "model") as directory:
        (directory / "weights").write_text("1")
    with VersionedDirectory(tmp_path / "new" / "steps", "step-{0:08d}").write(1) as directory:
        (directory / "weights").write_text("1")
    for parent in (tmp_path, tmp_path / "new", tmp_path / "new" / "steps"):
        assert parent.stat().st_ino in synced, "the names of directories, too"


def test_a_private_file_is_private_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    for left in (path, tmp_path / ".value.json.tmp"):  # an older version's, and a killed writer's
        left.touch()
        left.chmod(0o644)
    with (tmp_path / ".value.json.tmp").open() as reader:
        write_json(path, {}, mode=0o600)
        assert reader.read() == ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_a_library_replaces_has_the_usual_permissions(tmp_path: Path) -> None:
    """safetensors renames a file to the path, which only its owner may read."""
    (tmp_path / "usual").touch()
    with atomic_file(tmp_path / "weights") as temporary:
        (tmp_path / "private").touch(0o600)
        (tmp_path / "private").rename(temporary)
    assert (tmp_path / "weights").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_frees_its_space(tmp_path: Path) -> None:
    (tmp_path / "value").write_text("old")
    with pytest.raises(OSError, match="full"), atomic_file(tmp_path / "value") as temporary:
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, "full")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("value", "old")]


def test_a_writer_that_fails_leaves_the_file_of_another_that_has_begun(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / "value"), atomic_file(tmp_path / "value") as second:
        second.write_text("second")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    first = atomic_file(tmp_path / "value")
    first.__enter__()
    with atomic_file(tmp_path / "value") as second:
        second.write_text("second")
        assert not first.__exit__(OSError, OSError(), None)
    assert (tmp_path / "value").read_text() == "second"


def test_a_whole_directory_replaces_an_older_one(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with atomic_directory(tmp_path / "model") as directory:
            (directory / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["model", "model/second"]


def test_what_others_keep_in_the_parent_directory_stays(tmp_path: Path) -> None:
    kept = [tmp_path / ".tmp-directory-of-another-program", tmp_path / ".tmp-step-9"]
    for directory in kept:
        directory.mkdir()
    (tmp_path / ".tmp-file").write_text("another program's")
    with atomic_directory(tmp_path / "model") as directory:
        (directory / "weights").touch()
    assert all(directory.is_dir() for directory in kept)
    assert (tmp_path / ".tmp-file").read_text() == "another program's"


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-7").mkdir()
    (tmp_path / ".tmp-step-8").write_text("a file by that name")
    (tmp_path / ".removed-step-6").mkdir()
    kept = [tmp_path / name for name in (".tmp-step-x", ".tmp-step-07", ".replaced-step-5", ".step-4", "step-3")]
    for directory in kept:
        directory.mkdir()
    with VersionedDirectory(tmp_path, "step-{0:01d}").write(8) as directory:
        (directory / "weights").touch()
    assert {*tmp_path.iterdir()} == {*kept, tmp_path / "step-8"}


def test_an_old_directory_comes_back_if_the_new_one_cannot_get_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with atomic_directory(tmp_path / "model") as directory:
        (directory / "old").touch()
    rename = Path.rename

    def full(path: Path, target: Path) -> Path:
        if path.name == ".tmp-model":
            raise OSError(errno.ENOSPC, "full")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="full"), atomic_directory(tmp_path / "model") as directory:
        (directory / "new").touch()
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["old"]


def test_wherever_its_writer_is_killed_the_old_or_the_new_directory_is_there_after_the_next(
    tmp_path: Path, fuse: Any
) -> None:
    target = tmp_path / "model"

    def write(content: str) -> None:
        with atomic_directory(target) as directory:
            (directory / "weights").write_text(content)

    def fail() -> None:
        with atomic_directory(target):
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


class TestVersions:
    @pytest.fixture
    def versions(self, tmp_path: Path) -> VersionedDirectory:
        return VersionedDirectory(tmp_path / "root", "{0:04d}-{1:08d}")

    @staticmethod
    def write(versions: VersionedDirectory, *numbers: int) -> None:
        with versions.write(*numbers) as directory:
            (directory / "weights").write_text(str(numbers))

    def test_they_are_found_in_the_order_of_their_numbers(self, versions: VersionedDirectory, tmp_path: Path) -> None:
        assert (versions.by_numbers(), versions.newest()) == ({}, None)
        numbers = [(0, 144), (1, 9), (10_000, 1), (0, 40), (9999, 10**9)]
        for each in numbers:
            self.write(versions, *each)
        for name in ("0000-1", "0000-00000001x", ".tmp-0000-00000001", "00000-00000001", "latest.json"):
            (tmp_path / "root" / name).mkdir()
        assert versions.by_numbers() == {each: versions.path(*each) for each in sorted(numbers)}
        assert versions.newest() == tmp_path / "root" / "10000-00000001"
        assert versions.numbers("9999-1000000000") == (9999, 10**9)

    def test_the_number_that_decides_about_age_need_not_come_first_in_the_name(self, tmp_path: Path) -> None:
        snapshots = VersionedDirectory(tmp_path, "epoch-{1:04d}-version-{0:08d}")
        for version, epoch in ((2, 0), (1, 3)):
            self.write(snapshots, version, epoch)
        assert snapshots.newest() == tmp_path / "epoch-0000-version-00000002"
        assert snapshots.numbers("epoch-0003-version-00000001") == (1, 3)

    def test_a_directory_without_the_file_that_it_needs_is_none(self, tmp_path: Path) -> None:
        steps = VersionedDirectory(tmp_path, "step-{0:08d}", needs="weights")
        self.write(steps, 1)
        steps.path(2).mkdir()
        assert [*steps.by_numbers()] == [(1,)]

    def test_old_and_later_ones_are_removed(self, versions: VersionedDirectory) -> None:
        for version in range(6):
            self.write(versions, 0, version)
        versions.remove_old(keep=3, also=[versions.path(0, 1)])
        assert [version for _, version in versions.by_numbers()] == [1, 3, 4, 5]
        versions.remove_after(0, 3)
        assert [version for _, version in versions.by_numbers()] == [1, 3]

    def test_wherever_a_process_is_killed_each_is_whole_or_absent(self, tmp_path: Path, fuse: Any) -> None:
        """Versions that are written, removed because they are old, and because a run resumes before them."""

        def live(versions: VersionedDirectory, *numbers: int) -> None:
            self.write(versions, *numbers)
            versions.remove_old(keep=3)
            versions.remove_after(0, 4)

        for number in count(1):
            root = tmp_path / str(number)
            versions = VersionedDirectory(root, "{0:04d}-{1:08d}")
            for version in range(4):
                self.write(versions, 0, version)
            survived = fuse.lives(number, partial(live, versions, 0, 5))
            for numbers, path in versions.by_numbers().items():
                assert [file.read_text() for file in path.iterdir()] == [str(numbers)]
            assert {(0, 2), (0, 3)} <= {*versions.by_numbers()}
            assert not survived or [*versions.by_numbers()] == [(0, 2), (0, 3)]
            self.write(versions, 0, 4)
            assert not list(root.glob(".*")), "what was left is gone"
            if survived:
                assert number > 8
                break

    def test_what_cannot_be_removed_keeps_no_version_from_being_written(
        self, versions: VersionedDirectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: Path) -> None:
            raise PermissionError(f"{path} is read-only")

        self.write(versions, 0, 1)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", refuse)
            with pytest.raises(PermissionError):
                remove_directory(versions.path(0, 1))
            self.write(versions, 0, 2)
        assert [*versions.by_numbers()] == [(0, 2)]
        self.write(versions, 0, 3)
        assert len(list(versions.path(0, 3).parent.iterdir())) == 2

    def test_one_that_cannot_be_renamed_stays_whole(
        self, versions: VersionedDirectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: Path, target: Path) -> Path:
            raise OSError(errno.ENOSPC, "full")

        self.write(versions, 0, 1)
        monkeypatch.setattr(Path, "rename", refuse)
        with pytest.raises(OSError, match="full"):
            remove_directory(versions.path(0, 1))
        assert (versions.path(0, 1) / "weights").exists()
