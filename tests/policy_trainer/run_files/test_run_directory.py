"""A run's directory: whether it holds a run, what may change on resume, and its lock; server.json."""

import io
import math
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from policy_trainer.config import DataConfig, LossConfig, TrainConfig
from policy_trainer.run_files.run_directory import RunDirectory
from shared.errors import UserError


class TestRunDirectory:
    def test_a_run_that_failed_before_its_first_step_gives_way(self, tmp_path: Path) -> None:
        directory = RunDirectory(tmp_path / "run")
        directory.write_config(TrainConfig(model="m"))
        directory.metrics.write_text('{"kind": "evaluation", "step": 0}\n')
        assert not directory.open(TrainConfig(model="n"), Console(file=io.StringIO()), resume=False)
        assert not directory.metrics.exists(), "the new run writes its own"
        directory.metrics.write_text('{"kind": "evaluation", "step": 0}\n{"kind": "step", "step": 1}\n')
        with pytest.raises(UserError, match=r"^run_dir: .* holds a run already; add --resume"):
            directory.open(TrainConfig(model="n"), Console(file=io.StringIO()), resume=False)
        assert len(directory.metrics.read_text().splitlines()) == 2

    @pytest.mark.parametrize("value", [None, math.inf, [1, None], [{"a": math.nan}]])
    def test_refuses_values_that_toml_does_not_have(self, tmp_path: Path, value: Any) -> None:
        config = TrainConfig(model="m", data=DataConfig(chat_template_kwargs={"style": {"day": value}}))
        with pytest.raises(UserError, match=r"^data\.chat_template_kwargs\.style\.day: null, NaN and infinity cannot"):
            RunDirectory(tmp_path / "run").write_config(config)
        assert not (tmp_path / "run").exists()

    @pytest.fixture
    def begun(self, tmp_path: Path) -> RunDirectory:
        directory = RunDirectory(tmp_path / "run")
        directory.write_config(TrainConfig(model="m"))
        (directory.checkpoints / "step-00000020").mkdir(parents=True)
        (directory.checkpoints / "step-00000020" / "trainer.json").touch()
        return directory

    def test_says_what_a_resumed_run_changes(self, begun: RunDirectory) -> None:
        console = Console(file=io.StringIO(), width=60)
        config = TrainConfig(model="m", max_steps=7, loss=LossConfig(beta=0.1), run_dir=begun.root, run="default")
        assert begun.open(config, console, resume=True)
        began = "since the run was last started: "
        assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
            f"{began}max_steps: 100 -> 7", f"{began}loss.beta: 0.04 -> 0.1",
        ]  # fmt: skip
        assert tomllib.loads(begun.config.read_text())["max_steps"] == 7

    def test_refuses_what_would_make_waiting_batches_wrong(self, begun: RunDirectory) -> None:
        written = begun.config.read_text()
        config = TrainConfig(model="n", seed=3, rewards=["format"], max_steps=7)
        with pytest.raises(UserError) as refused:
            begun.open(config, Console(file=io.StringIO()), resume=True)
        first, *listed, remedy = str(refused.value).splitlines()
        assert first.startswith("model: ") and listed == ["  model: m -> n", "  seed: 0 -> 3", "and 1 more"]
        assert f"--model {begun.checkpoints}/step-00000020 --run-dir OTHER" in remedy
        assert begun.config.read_text() == written

    def test_a_configuration_of_an_older_version_is_compared(self, begun: RunDirectory) -> None:
        begun.config.write_text("gone = 1\n" + begun.config.read_text())
        assert begun.open(TrainConfig(model="m"), Console(file=io.StringIO()), resume=True)

    def test_a_run_keeps_its_lineage_until_another_begins(self, tmp_path: Path) -> None:
        directory = RunDirectory(tmp_path)
        assert directory.lineage == ""
        first = directory.keep_lineage()  # no run.json yet, as after it was deleted
        assert first
        assert (directory.keep_lineage(), RunDirectory(tmp_path).lineage) == (first, first)
        assert directory.begin_lineage() not in ("", first)

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

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"run_dir: .*new cannot be written: No space left on device; choose"):
        RunDirectory(tmp_path / "new").open(config, console, resume=False)
