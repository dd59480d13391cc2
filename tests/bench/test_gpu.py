"""The GPU benchmark on a CPU: what it prints and writes, and what it does when a table or the memory fails."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.batch import TokenGroup
from tests.bench import gpu
from tests.bench.gpu_exactness import distance
from tests.bench.gpu_meters import CpuMeter, compare
from tests.bench.gpu_rows import Ratio, Row, Setting, Share, Table, make_model, show
from tests.bench.gpu_speed import compiled, step
from tests.bench.scoring import ours

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Output and JSON of the command as a user runs it, without compiling, which takes a minute."""
    file = tmp_path_factory.mktemp("gpu") / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.gpu", "--device", "cpu", "--json", file],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout, json.loads(file.read_text())


class TestTheCommand:
    def test_every_table_is_printed_and_written(self, report: tuple[str, dict[str, Any]]) -> None:
        printed, written = report
        assert list(written["tables"]) == list(gpu.TABLES)
        for name, table in gpu.TABLES.items():
            assert table.title[:40] in printed
            assert written["tables"][name]["rows"]
            assert "error" not in written["tables"][name]

    def test_it_says_that_these_are_figures_of_a_cpu(self, report: tuple[str, dict[str, Any]]) -> None:
        printed, written = report
        assert gpu.CPU_NOTE in printed
        assert (written["device"], written["dtype"], written["sizes"]) == ("a CPU", "bfloat16", "tiny")

    def test_forms_that_run_on_a_cpu_pass_the_self_test(self, report: tuple[str, dict[str, Any]]) -> None:
        varlen, packed, padded = report[1]["tables"]["forms"]["rows"]
        assert "NotImplementedError" in varlen["self-test"]
        assert (packed["chosen"], padded["chosen"]) == ("chosen", "")
        for row in (packed, padded):
            assert row["self-test"] < row["allowed"]
            # bfloat16 has 8 bits; gradients in float32 would be the same to 1e-6.
            assert 1e-4 < row["gradients, from float32"] < 0.05

    def test_errors_of_half_precision_are_small(self, report: tuple[str, dict[str, Any]]) -> None:
        mine, _, other = report[1]["tables"]["values"]["rows"]
        assert 0 < mine["mean distance from float32"] < other["mean distance from float32"] < 0.1
        assert 0 <= mine["KL to itself, packed otherwise"] < 1e-4

    def test_both_sides_have_time_and_memory(self, report: tuple[str, dict[str, Any]]) -> None:
        for table in ("classic", "steps"):
            for row in report[1]["tables"][table]["rows"]:
                assert row["classic / ours"]["value"] == pytest.approx(row["classic ms"] / row["ours ms"])
                assert row["ours MiB"] >= 0

    def test_every_number_of_tokens_has_a_row(self, report: tuple[str, dict[str, Any]]) -> None:
        rows = report[1]["tables"]["tokens"]["rows"]
        tokens = [row["tokens"] / CpuMeter.scale for row in rows]
        assert tokens == pytest.approx([1024, 2048, 4096, 8192, 16_384, 32_768], rel=0.1)
        assert all(row["share"]["value"] > 0 for row in rows)


def broken(setting: Setting) -> Iterator[Row]:
    yield {"a": 1}
    raise RuntimeError("no such kernel")


def sound(setting: Setting) -> Iterator[Row]:
    yield {"b": Ratio(3.0, 2.0)}


class TestFailures:
    def test_a_table_that_fails_leaves_its_rows_and_the_other_tables(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(gpu, "TABLES", {"broken": Table("Broken", broken), "sound": Table("Sound", sound)})
        assert gpu.main(["--device", "cpu", "--json", str(tmp_path / "figures.json")]) == 1
        tables = json.loads((tmp_path / "figures.json").read_text())["tables"]
        assert tables["broken"]["rows"] == [{"a": 1}]
        assert tables["broken"]["error"] == "RuntimeError: no such kernel"
        assert tables["sound"]["rows"] == [{"b": {"value": 3.0, "least": 2.0}}]
        printed = capsys.readouterr().out
        assert "no such kernel" in printed and "3.0x (bar 2)" in printed
        assert printed.endswith("failed: broken\n")

    def test_a_side_that_does_not_fit_leaves_the_others(self, capsys: pytest.CaptureFixture[str]) -> None:
        def too_much() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        taken = compare(CpuMeter(CPU), {"fits": lambda: None, "does not": too_much})
        assert taken["does not"] is None
        assert taken["fits"] is not None and taken["fits"].seconds >= 0
        show("Sides", [{"classic ms": taken["does not"]}])
        assert "does not fit" in capsys.readouterr().out

    def test_a_backward_that_runs_out_of_memory_leaves_no_gradients(self) -> None:
        model = make_model("tiny", torch.float32, CPU)

        def too_much(gradient: Tensor) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        model.model.layers[0].mlp.up_proj.weight.register_hook(too_much)  # after the gradients of the last layer
        with pytest.raises(torch.OutOfMemoryError):
            step(model, ours(model), [TokenGroup(np.array([5, 6]), np.array([7, 8]), np.array([1, 1]))])
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_a_failed_compilation_gives_its_reason(self) -> None:
        def score(groups: Sequence[TokenGroup]) -> Tensor:
            raise NotImplementedError("dynamic shapes\nand a long trace")

        assert compiled(CpuMeter(CPU), score, []) == {
            "eager / compiled": "skipped: NotImplementedError: dynamic shapes"
        }


class TestFigures:
    @pytest.mark.parametrize(
        ("size", "parameters"), [("0.5B", 494_032_768), ("3B", 3_085_938_688), ("7B", 7_615_616_512)]
    )
    def test_sizes_are_those_of_the_published_models(self, size: str, parameters: int) -> None:
        model = make_model(size, torch.bfloat16, torch.device("meta"))
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters
        assert model.dtype == torch.bfloat16

    def test_bars_are_named_and_misses_marked(self) -> None:
        assert [str(Share(share, 0.45)) for share in (0.5, 0.4)] == ["50% (bar 45%)", "40% (bar 45%, MISSED)"]
        assert asdict(Share(0.5, 0.45)) == {"value": 0.5, "least": 0.45}

    def test_the_distance_of_gradients_is_relative_to_the_right_ones(self) -> None:
        right = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
        wrong = {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([4.0])}
        assert distance(wrong, right) == pytest.approx(0.2)
        assert distance(None, right) is None
