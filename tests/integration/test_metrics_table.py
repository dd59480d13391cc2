"""docs/metrics.md names exactly the fields that a run writes, and TensorBoard has their values."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from policy_trainer.reporting.health import Trouble, health_record
from policy_trainer.reporting.metrics import read_metrics
from policy_trainer.reward_model.training import PreferenceStats
from policy_trainer.sft.sft import SupervisedStats
from tests.integration.processes import Server, steps_of
from tests.integration.runs import QUICK, train

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| (step|evaluation|health|all|sft step|reward-model step) \| `([^`]+)` \| ", re.MULTILINE)


def documented(kind: str) -> set[str]:
    return {name for of, name in ROW.findall(PAGE.read_text()) if of in (kind, "all")}


def written(records: list[dict[str, Any]], kind: str) -> set[str]:
    """Names of a kind of record; those of a reward as `<name>`."""
    names = {name for record in records if record["kind"] == kind for name in record}
    return {re.sub("/.*", "/<name>", name) for name in names}


@pytest.fixture(scope="module")
def run_dir(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("metrics")
    refused = directory / "run" / "workers" / "1-of-2" / "000000000007.refused"
    refused.parent.mkdir(parents=True)
    refused.touch()
    server = Server(random_model, directory)
    trainer = train(random_model, server, directory / "run", *QUICK, "--max-steps", "3", "--report-to", "tensorboard")
    try:
        assert trainer.wait() == 0, trainer.output()
    finally:
        trainer.kill()
        server.kill()
    return directory / "run"


@pytest.mark.parametrize("kind", ["step", "evaluation"])
def test_the_table_lists_what_a_run_writes(run_dir: Path, kind: str) -> None:
    assert written(read_metrics(run_dir / "metrics.jsonl"), kind) == documented(kind)


def test_the_table_lists_fields_of_health_records() -> None:
    trouble = Trouble("kl", 9.0, "below 1", "lower the learning rate")
    assert set(health_record(trouble, 1)) == documented("health")


def test_the_table_lists_fields_of_sft_records() -> None:
    assert {field.name for field in fields(SupervisedStats)} | {"kind", "step"} == documented("sft step")


def test_the_table_lists_fields_of_reward_model_records() -> None:
    assert {field.name for field in fields(PreferenceStats)} | {"kind", "step"} == documented("reward-model step")


def test_batches_that_the_server_refused_are_counted(run_dir: Path) -> None:
    assert [record["refused_batches"] for record in steps_of(run_dir)] == [1, 1, 1]


def test_tensorboard_has_every_number(run_dir: Path) -> None:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    steps = [record for record in read_metrics(run_dir / "metrics.jsonl") if record["kind"] == "step"]
    for name in ("kl", "entropy", "tokens_per_second", "reward/tags"):
        shown = [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        assert shown == [(record["step"], pytest.approx(record[name])) for record in steps]
    assert events.Scalars("evaluation/accuracy")[0].step == 0
