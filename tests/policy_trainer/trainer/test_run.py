"""From a configuration to its run: refused rewards, epochs as steps, threads."""

import io
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from policy_trainer.config import TrainConfig
from policy_trainer.data.tasks.registry import make_task
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.parts import cpu_threads
from policy_trainer.trainer.run import count_steps
from shared.settings import from_values


class TestEpochs:
    def count(self, tmp_path: Path, **settings: Any) -> tuple[TrainConfig, TrainConfig, str]:
        """The given configuration, that with its steps, and what was printed."""
        output = io.StringIO()
        config = from_values(TrainConfig, model="m", run_dir=tmp_path / "run", groups_per_step=100, **settings)
        counted = count_steps(config, lambda: make_task(config), Console(file=output, width=200))
        return config, counted, output.getvalue()

    @pytest.mark.parametrize(
        ("settings", "steps", "message"),
        [
            ({"num_train_epochs": 2}, 180, "180 steps"),
            ({"num_train_epochs": 2, "max_steps": 7}, 7, "num_train_epochs = 2 is not used"),
            ({}, 100, ""),
            ({"max_updates": 10, "num_iterations": 4}, 3, ""),
            ({"max_updates": 1000, "num_iterations": 4}, 100, ""),
            ({"max_updates": 5, "num_train_epochs": 2}, 5, "180 steps"),
        ],
    )
    def test_epochs_decide_the_steps_unless_they_are_given(
        self, settings: dict[str, Any], steps: int, message: str, tmp_path: Path
    ) -> None:
        _, counted, output = self.count(tmp_path, **settings)
        assert counted.max_steps == steps
        assert message in output and bool(message) == bool(output)

    def test_a_resumed_run_counts_the_same_steps(self, tmp_path: Path) -> None:
        config, counted, _ = self.count(tmp_path, num_train_epochs=0.5)
        RunDirectory(config.run_dir).write_config(config)
        values = tomllib.loads((config.run_dir / "config.toml").read_text())
        resumed = from_values(TrainConfig, **values)
        again = count_steps(resumed, lambda: make_task(resumed), Console(quiet=True))
        assert again.max_steps == counted.max_steps == 45


class TestThreads:
    @pytest.fixture(autouse=True)
    def six_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 6)

    @pytest.mark.parametrize(
        ("settings", "threads"),
        [
            ({}, 3),
            ({"threads": 5}, 5),
            ({"max_lag": 2}, 3),
            ({"max_lag": 0}, None),
            ({"rollout": "external"}, None),
        ],
    )
    def test_a_run_whose_processes_compute_at_the_same_time_shares_the_cores(
        self, settings: dict[str, Any], threads: int | None
    ) -> None:
        assert cpu_threads(from_values(TrainConfig, **{"model": "m", "device": "cpu", **settings})) == threads

    def test_one_core_is_a_thread_each(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        assert cpu_threads(from_values(TrainConfig, model="m", device="cpu")) == 1

    def test_ranks_keep_what_torchrun_gave_them(self) -> None:
        assert cpu_threads(from_values(TrainConfig, model="m", device="cpu"), ranks=2) is None
