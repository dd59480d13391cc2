"""Learning curves: results from a run's metrics, the page and the picture, recipes, and countdown demonstrations."""

import random
from pathlib import Path

import pytest

from policy_trainer.config import SourceConfig, TrainConfig
from policy_trainer.data.problem import Sample
from policy_trainer.presets import PRESETS
from policy_trainer.tasks.countdown import countdown
from tests.bench.base_models import attempt
from tests.bench.curves import Point, Result, result_of
from tests.bench.curves_recipes import COUNTDOWN, RunSetup, names, recipe
from tests.bench.curves_report import draw, write_page


def step(number: int, **figures: float) -> dict[str, object]:
    known = {"completions": 32, "groups": 3, "groups_left_out": 1, "resampled_groups": 0, "kl": 0.1, "entropy": 0.5}
    return {"kind": "step", "step": number, **known, **figures}


def test_samples_include_discarded_groups() -> None:
    evaluations = [{"kind": "evaluation", "step": at, "accuracy": at / 4} for at in (0, 2)]
    records = [evaluations[0], step(1), step(2, resampled_groups=2, kl=0.3), evaluations[1]]
    result = result_of("dapo", 1, 2, records, 3.21)
    assert result.curve == [Point(0, 0, 0.0), Point(2, 32 + 32 + 16, 0.5)]
    assert (result.kl, result.seconds, result.samples_to(0.5), result.samples_to(0.6)) == (0.3, 3.2, 80, None)


def test_page_and_picture(tmp_path: Path) -> None:
    results = [
        Result(name, seed, 9, [Point(0, 0, 0.25), Point(9, 1000 + seed, 0.5 + 0.25 * seed)], kl, 0.125, 1.0)
        for name, kl in (("gspo", None), (COUNTDOWN, 0.5))
        for seed in (0, 1)
    ]
    draw(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    write_page("curves", results, tmp_path / "page.md", "picture.png")
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert (
        "| `gspo` | 0.25 | 0.62 (0.50 to 0.75) | 1,000 (1,000 to 1,001) | 1,000 (1,000 to 1,001) | - | - | 0.125 "
        "| 4 updates a step |"
    ) in lines
    assert next(line for line in lines if line.startswith("| countdown")).count("0.500") == 1
    assert "**2 of these 2 lift accuracy with every seed**." in "\n".join(lines)


def test_algorithms_that_did_not_learn_are_named(tmp_path: Path) -> None:
    """The 95% interval of 0.29 over 256 problems contains the initial 0.25."""
    results = [
        Result("gspo", 0, 9, [Point(0, 0, 0.25), Point(9, 100, after)], None, None, 1.0) for after in (0.9, 0.29)
    ]
    write_page("curves", results, tmp_path / "page.md", "picture.png")
    assert "**0 of these 1 lift accuracy with every seed**; `gspo` did not." in (tmp_path / "page.md").read_text()


def test_recipes_take_the_algorithm_from_the_preset_and_the_rest_from_the_demo(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tests.bench.curves_recipes.base_model", lambda name: tmp_path)
    monkeypatch.setattr("tests.bench.curves_recipes.cached_teacher", lambda cache: tmp_path)
    for name in names():
        config = recipe(name, RunSetup(tmp_path, tmp_path / "run", 3, 100))
        updates = config.num_iterations * config.minibatches
        assert isinstance(config, TrainConfig) and config.sampling.num_generations == 8
        assert config.optimizer.learning_rate * updates == pytest.approx(3e-4)
        if name in PRESETS:
            preset = PRESETS[name].config()
            assert (config.loss, config.num_iterations, config.minibatches) == (
                preset.loss,
                preset.num_iterations,
                preset.minibatches,
            )
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
        assert Sample(problem, text).completion == text
