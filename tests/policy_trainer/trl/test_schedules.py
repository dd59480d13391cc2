"""Updates and learning rates: those of TRL and transformers, at combinations of epochs, steps, accumulation, generation
batches, iterations, warmups and schedules."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset

from policy_trainer.config import TrainConfig
from policy_trainer.learner.optimizer import learning_rates
from policy_trainer.trl import GRPOConfig
from policy_trainer.trl.mapping import settings
from policy_trainer.trl.steps import count_steps

PEAK = 1e-3


class Case(NamedTuple):
    """rows: of the dataset. updates: TRL's, of the run. shape: groups_per_step, minibatches, num_iterations, max_steps
    of ours. warmup: in updates."""

    rows: int
    given: dict[str, Any]
    updates: int
    shape: tuple[int, int, int, int]
    warmup: int = 0


CASES = {
    "epochs": Case(10, {"num_train_epochs": 2}, 20, (1, 1, 1, 20)),
    "accumulation": Case(10, {"num_train_epochs": 1.5, "gradient_accumulation_steps": 2}, 8, (2, 1, 1, 8)),
    "minibatches": Case(10, {"steps_per_generation": 4, "gradient_accumulation_steps": 2}, 12, (4, 2, 1, 6)),
    "iterations": Case(3, {"num_iterations": 2, "num_train_epochs": 1, "warmup_steps": 3}, 6, (1, 1, 2, 3), 3),
    "stops in a step": Case(
        40,
        {"max_steps": 7, "steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2},
        7,
        (4, 2, 2, 2),
    ),
    "cosine": Case(10, {"max_steps": 5, "lr_scheduler_type": "cosine", "warmup_steps": 0.3}, 5, (1, 1, 1, 5), 2),
    "batches in an update": Case(
        40, {"max_steps": 3, "steps_per_generation": 2, "gradient_accumulation_steps": 4}, 3, (4, 1, 1, 3)
    ),
    "iterations in an update": Case(
        8, {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 1}, 24, (1, 1, 1, 24)
    ),
    "half groups": Case(
        9,
        {
            "max_steps": 6, "per_device_train_batch_size": 4, "steps_per_generation": 2, "warmup_steps": 2,
            "lr_scheduler_type": "constant_with_warmup",
        },
        6,
        (1, 2, 1, 3),
        2,
    ),
    "a share of an epoch": Case(
        20,
        {
            "num_train_epochs": 0.5, "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "steps_per_generation": 3,
        },
        9,
        (3, 3, 1, 3),
    ),
    "polynomial": Case(
        7,
        {
            "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}, "steps_per_generation": 2,
            "num_iterations": 3, "warmup_steps": 0.1, "num_train_epochs": 1,
        },
        18,
        (2, 2, 3, 3),
        2,
    ),
}  # fmt: skip


def config_of(case: Case) -> TrainConfig:
    args = GRPOConfig("out", learning_rate=PEAK, **case.given)
    values = settings(args, count_steps(args, case.rows), in_chat=True, evaluates=False)
    data: Any = {**values.pop("data"), "path": "x.jsonl"}
    return TrainConfig(model="m", task="jsonl", data=data, **values)


def applied(config: TrainConfig) -> list[float]:
    """The learning rate of each update of the run."""
    return [rate for step in range(config.max_steps) for rate in learning_rates(step, config)]


@pytest.mark.parametrize("name", CASES)
def test_each_update_has_the_learning_rate_of_transformers_schedule(name: str) -> None:
    from transformers import get_scheduler

    case = CASES[name]
    config = config_of(case)
    assert (config.groups_per_step, config.minibatches, config.num_iterations, config.max_steps) == case.shape
    rates = applied(config)
    assert len(rates) == case.updates
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    theirs = get_scheduler(
        case.given.get("lr_scheduler_type", "linear"),
        optimizer,
        num_warmup_steps=case.warmup,
        num_training_steps=case.updates,
        scheduler_specific_kwargs=case.given.get("lr_scheduler_kwargs"),
    )
    for rate in rates:
        assert rate == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=0)
        optimizer.step()
        theirs.step()


def test_a_schedule_by_hand() -> None:
    """Two updates a step, of which the last step has one; the first update has learning rate 0 in a warmup."""
    case = Case(9, {"num_iterations": 2, "max_steps": 5, "warmup_steps": 2}, 5, (1, 1, 2, 3))
    assert applied(config_of(case)) == pytest.approx([0, PEAK / 2, PEAK, PEAK * 2 / 3, PEAK / 3])


def test_updates_after_a_step_and_of_a_pass() -> None:
    """Two updates a step, of which the last step has one. Without rows the run is the pass."""
    args = GRPOConfig("out", num_iterations=2, max_steps=5)
    steps = count_steps(args, 9)
    assert [steps.after(step) for step in range(steps.total + 1)] == [0, 2, 4, 5]
    assert (steps.epoch, count_steps(args, None).epoch) == (18, 5)


@pytest.mark.slow  # TRL takes seconds to import
@pytest.mark.parametrize("name", CASES)
def test_updates_and_warmups_are_counted_as_trl_counts_them(
    name: str, make_tiny: Any, tokenizer: Any, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    case = CASES[name]
    args = trl.GRPOConfig(
        str(tmp_path), learning_rate=PEAK, use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False,
        activation_checkpointing=False, **case.given,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": "a"}] * case.rows)
    trainer = trl.GRPOTrainer(make_tiny(), lambda **_: [], args, rows, processing_class=tokenizer)
    *_, updates = trainer.set_initial_training_values(args, trainer.get_train_dataloader())
    assert updates == case.updates
    trainer.create_optimizer_and_scheduler(updates)
    (schedule, *_), config = trainer.lr_scheduler.lr_lambdas, config_of(case)
    assert applied(config) == pytest.approx([PEAK * schedule(update) for update in range(updates)], rel=1e-12, abs=0)
    assert math.isclose(config.optimizer.adam_epsilon, args.adam_epsilon)
