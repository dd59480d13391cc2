"""A run's directory: when it holds a run, and what a crash leaves of its configuration."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from policy_trainer.config import TrainConfig
from policy_trainer.run_files.run_directory import RunDirectory
from shared.errors import UserError


class TestRunDirectory:
    def test_holds_a_run(self, tmp_path: Path) -> None:
        directory = RunDirectory(tmp_path / "run")
        assert not directory.holds_a_run()
        directory.write_config(TrainConfig(model="m"))
        assert not directory.holds_a_run(), "a configuration alone is no run"
        directory.metrics.touch()
        assert not directory.holds_a_run(), "nor is a file that a refused command has opened"
        directory.metrics.write_text("{}\n")
        assert directory.holds_a_run()

    def test_a_crash_leaves_a_whole_configuration(self, tmp_path: Path, fuse: Any) -> None:
        """The old one or the new one, whatever file operation was the last."""
        directory = RunDirectory(tmp_path)
        directory.write_config(TrainConfig(model="old"))
        survived, operations = False, 0
        while not survived:
            operations += 1
            survived = fuse.lives(operations, lambda: directory.write_config(TrainConfig(model="new")))
            model = tomllib.loads(directory.config.read_text())["model"]
            assert model == "new" if survived else model in ("old", "new")
        assert operations > 2


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    console, config = Console(quiet=True), TrainConfig(model="m")
    with pytest.raises(UserError, match=r"run_dir: .*file cannot be written: it is a file; choose another --run-dir"):
        RunDirectory(tmp_path / "file").open(config, console, resume=False)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"run_dir: .*new cannot be written: No space left on device; choose"):
        RunDirectory(tmp_path / "new").open(config, console, resume=False)
