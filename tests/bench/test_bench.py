"""The benchmarks' own arithmetic: learning curves, stale samples, the simulated pipeline, GPU tables on a CPU."""

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from policy_trainer.config import EvaluationConfig, OptimizerConfig, SamplingConfig, SourceConfig, TrainConfig
from policy_trainer.demo.base_model import make_model, make_tokenizer
from policy_trainer.presets import PRESETS
from policy_trainer.tasks.countdown import countdown
from shared.logprobs import choose_forward
from shared.settings import from_values
from tests.bench import gpu
from tests.bench.base_models import attempt
from tests.bench.curves import result_of
from tests.bench.curves_recipes import COUNTDOWN, RunSetup, names, recipe
from tests.bench.curves_report import Point, Result, draw, write_page
from tests.bench.gpu_tables import CpuMeter, Ratio, Row, Setting, Table, compare
from tests.bench.lagged import LaggedSampler, Outcome, train
from tests.bench.off_policy import LOSSES
from tests.bench.pipeline import Stages, measured, predict


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def step(number: int, **figures: float) -> dict[str, object]:
    values = {"completions": 32, "groups": 3, "groups_left_out": 1, "resampled_groups": 0, "kl": 0.1, "entropy": 0.5}
    return {"kind": "step", "step": number, **values, **figures}


def test_samples_of_a_curve_include_discarded_groups() -> None:
    evaluations = [{"kind": "evaluation", "step": at, "accuracy": at / 4} for at in (0, 2)]
    records = [evaluations[0], step(1), step(2, resampled_groups=2, kl=0.3), evaluations[1]]
    result = result_of("dapo", 1, 2, records, 3.21)
    assert result.curve == [Point(0, 0, 0.0), Point(2, 32 + 32 + 16, 0.5)]
    assert (result.kl, result.seconds, result.samples_to(0.5), result.samples_to(0.6)) == (0.3, 3.2, 80, None)


def test_page_and_picture_of_the_curves(tmp_path: Path) -> None:
    results = [
        Result(name, seed, 9, [Point(0, 0, 0.25), Point(9, 1000 + seed, 0.5 + 0.25 * seed)], kl, 0.125, 1.0)
        for name, kl in (("gspo", None), (COUNTDOWN, 0.5))
        for seed in (0, 1)
    ]
    draw(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    write_page("curves", results, tmp_path / "page.md", "picture.png")
    page = (tmp_path / "page.md").read_text()
    assert "| `gspo` | 0.25 | 0.62 (0.50 to 0.75) | 1,000 (1,000 to 1,001) |" in page
    assert "**2 of these 2 lift accuracy with every seed**." in page
    # The 95% interval of 0.29 over 256 problems contains the initial 0.25.
    low = Result("gspo", 2, 9, [Point(0, 0, 0.25), Point(9, 100, 0.29)], None, None, 1.0)
    write_page("curves", [*results, low], tmp_path / "page.md", "picture.png")
    assert "**1 of these 2 lift accuracy with every seed**; `gspo` did not." in (tmp_path / "page.md").read_text()


def test_recipes_take_the_algorithm_from_the_preset_and_the_rest_from_the_demo(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tests.bench.curves_recipes.base_model", lambda name: tmp_path)
    monkeypatch.setattr("tests.bench.curves_recipes.cached_teacher", lambda cache: tmp_path)
    for name in names():
        config = recipe(name, RunSetup(tmp_path, tmp_path / "run", 3, 100))
        updates = config.num_iterations * config.minibatches
        assert config.sampling.num_generations == 8
        assert config.optimizer.learning_rate * updates == pytest.approx(3e-4)
        if name in PRESETS:
            preset = PRESETS[name].config()
            assert (config.loss, updates) == (preset.loss, preset.num_iterations * preset.minibatches)
            assert bool(config.reference.sync_steps) == bool(preset.reference.sync_steps)


def test_countdown_attempts_are_computed_correctly() -> None:
    task, chance = countdown(SourceConfig(), 0), random.Random(0)
    for index in range(200):
        problem = task.problem(index)
        text = attempt(problem, right=index % 2 == 0, chance=chance)
        work, _, answer = text.removesuffix("</answer>").partition("</think>\n<answer>")
        assert all(eval(left) == int(value) for left, value in (item.split("=") for item in work.split(",")))
        right = task.correct(problem, text)
        assert right == float(eval(answer) == problem.extras["target"]) and (right or index % 2)


def lagged_config() -> TrainConfig:
    """An untrained model has no right answer, but longer and shorter ones."""
    return from_values(
        TrainConfig,
        model="made",
        task="arithmetic",
        rewards=["length"],
        max_steps=2,
        groups_per_step=2,
        sampling=SamplingConfig(num_generations=8, max_completion_length=40),
        loss=LOSSES["cispo"],
        optimizer=OptimizerConfig(learning_rate=1e-2),
        evaluation=EvaluationConfig(problems=2, batch_size=2),
    )


def test_a_step_samples_with_the_weights_of_lag_steps_ago_or_the_first() -> None:
    model = make_model(0)
    sampler = LaggedSampler(lagged_config(), copy.deepcopy(model), make_tokenizer(), 2)
    states: list[dict[str, torch.Tensor]] = []
    for number in range(4):
        with torch.no_grad():
            model.lm_head.weight.mul_(1.1)
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        sampler.keep(number, states[-1])
        if number == 1:
            assert {batch.policy_version for batch in sampler.sample(1)} == {0}
    batches = sampler.sample(3)
    assert [batch.policy_version for batch in batches] == [1, 1]
    model.load_state_dict(states[1])
    with torch.no_grad():
        expected = choose_forward(model)([batch.group for batch in batches], [1.0, 1.0]).numpy()
    sampled = np.concatenate([np.asarray(batch.sampler_logps) for batch in batches])
    np.testing.assert_allclose(sampled, expected, atol=1e-4)


def test_stale_training_is_reproducible_and_depends_on_the_lag() -> None:
    def run(lag: int) -> Outcome:
        return train(lagged_config(), [make_model(0) for _ in range(3)], make_tokenizer(), lag)

    fresh = run(0)
    assert fresh.kl > 0 and fresh.entropy > 0
    assert run(0) == fresh != run(1)


# One worker, one scorer and one trainer each take 8 s for a step.
EVEN = Stages(sample=1.0, score=1.0, train=8.0, groups=8)


@pytest.mark.parametrize(
    ("change", "sizes", "seconds"),
    [
        ({"sample": 3.0}, (1, 1, 1), 24),
        ({"score": 3.0}, (1, 1, 1), 24),
        ({"train": 24.0}, (1, 1, 1), 24),
        ({"sample": 3.0}, (2, 1, 1), 12),
        ({"sample": 3.0}, (6, 1, 1), 8),
        ({"train": 24.0}, (2, 2, 2), 12),
        ({"sample": 3.0, "load": 6.0}, (1, 1, 1), 30),
        ({"sample": 3.0, "load": 6.0, "publish_every": 4}, (1, 1, 1), 25.5),
    ],
)
def test_the_slowest_stage_determines_a_step(change: dict, sizes: tuple[int, int, int], seconds: float) -> None:
    workers, scorers, trainers = sizes
    prediction = predict(replace(EVEN, **change), workers=workers, scorers=scorers, trainers=trainers)
    assert prediction.seconds_per_step == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("waiting", [8, 24, 80])
def test_staleness_follows_from_the_groups_that_wait(waiting: int) -> None:
    """If the trainer is slowest: waiting groups, those leased ahead, and those in the workers' hands."""
    fast = replace(EVEN, sample=0.01, score=0.01, max_waiting=waiting)
    prediction = predict(fast, workers=1, scorers=1, trainers=1)
    assert waiting / 8 <= prediction.staleness <= (waiting + 8 + 8) / 8


def test_stages_are_read_from_a_run(tmp_path: Path) -> None:
    record = {"kind": "step", "batch_ids": ["a", "b"], "sampling_seconds": 4.0, "training_seconds": 3.0}
    records = [
        {**record, "waiting_seconds": 2.0, "server_scoring_seconds": 0.5 * number, "staleness": 1.5}
        for number in range(30)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (tmp_path / "config.toml").write_text("publish_every = 2\n[sampling]\nprompts_per_round = 4\n")
    stages, observed = measured(tmp_path)
    assert stages == Stages(sample=2.0, score=0.25, train=3.0, groups=2, publish_every=2, prompts_per_round=4)
    assert (observed.seconds_per_step, observed.staleness) == (5.0, 1.5)
    assert (observed.workers, observed.trainer) == (0.8, 0.6)


def test_the_gpu_tables_on_a_cpu(tmp_path: Path) -> None:
    """The command as a user runs it, without compiling, which takes a minute."""
    command = [sys.executable, "-m", "tests.bench.gpu", "--device", "cpu", "--json", tmp_path / "figures.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and gpu.CPU_NOTE in done.stdout, done.stdout
    tables = json.loads((tmp_path / "figures.json").read_text())["tables"]
    assert list(tables) == list(gpu.TABLES)
    assert all(tables[name]["rows"] and "error" not in tables[name] for name in gpu.TABLES)
    _, packed, padded = tables["forms"]["rows"]
    assert (packed["chosen"], padded["chosen"]) == ("chosen", "")
    for row in (packed, padded):  # bfloat16 has 8 bits; gradients in float32 would be equal to 1e-6
        assert row["self-test"] < row["allowed"] and 1e-4 < row["gradients, from float32"] < 0.05
    for row in (*tables["classic"]["rows"], *tables["steps"]["rows"]):
        assert row["classic / ours"]["value"] == pytest.approx(row["classic ms"] / row["ours ms"])
    counts = [row["tokens"] / CpuMeter.scale for row in tables["tokens"]["rows"]]
    assert counts == pytest.approx([1024, 2048, 4096, 8192, 16_384, 32_768], rel=0.1)


def test_a_gpu_table_that_fails_leaves_its_rows_and_the_others(monkeypatch, tmp_path: Path, capsys) -> None:
    def broken(setting: Setting) -> Iterator[Row]:
        yield {"a": 1}
        raise RuntimeError("no such kernel")

    def sound(setting: Setting) -> Iterator[Row]:
        yield {"b": Ratio(3.0, 2.0)}

    monkeypatch.setattr(gpu, "TABLES", {"broken": Table("Broken", broken), "sound": Table("Sound", sound)})
    assert gpu.main(["--device", "cpu", "--json", str(tmp_path / "figures.json")]) == 1
    tables = json.loads((tmp_path / "figures.json").read_text())["tables"]
    assert (tables["broken"]["rows"], tables["broken"]["error"]) == ([{"a": 1}], "RuntimeError: no such kernel")
    assert tables["sound"]["rows"] == [{"b": {"value": 3.0, "least": 2.0}}]
    assert "3.0x (bar 2)" in capsys.readouterr().out


def test_a_side_that_runs_out_of_memory_leaves_the_others() -> None:
    def too_much() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    sides = compare(CpuMeter(torch.device("cpu")), {"fits": lambda: None, "does not": too_much})
    assert sides["does not"] is None and sides["fits"] is not None
