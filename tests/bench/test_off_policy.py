"""The comparison of corrections: samples are as old as they should be, and the same numbers come every time."""

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from policy_trainer.config import EvaluationConfig, LossConfig, OptimizerConfig, SamplingConfig, TrainConfig
from policy_trainer.demo.base_model import make_model, make_tokenizer
from shared.logprobs import choose_forward
from shared.settings import from_values
from tests.bench.lagged import LaggedSampler, Outcome, train
from tests.bench.off_policy import LOSSES, header, row


def config(loss: LossConfig = LOSSES["cispo"]) -> TrainConfig:
    """An untrained model has no right answer, but longer and shorter ones."""
    return from_values(
        TrainConfig,
        model="made",
        task="arithmetic",
        rewards=["length"],
        max_steps=2,
        groups_per_step=2,
        sampling=SamplingConfig(num_generations=8, max_completion_length=40),
        loss=loss,
        optimizer=OptimizerConfig(learning_rate=1e-2),
        evaluation=EvaluationConfig(problems=2, batch_size=2),
    )


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads cost more than they bring at this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model(0)


def test_a_step_samples_with_the_weights_of_lag_steps_ago(model: PreTrainedModel) -> None:
    sampler = LaggedSampler(config(), copy.deepcopy(model), make_tokenizer(), 2)
    states: list[dict[str, torch.Tensor]] = []
    for step in range(4):
        with torch.no_grad():
            model.lm_head.weight.mul_(1.1)
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        sampler.keep(step, states[-1])
    batches = sampler.sample(3)
    assert [batch.policy_version for batch in batches] == [1, 1]
    model.load_state_dict(states[1])
    with torch.no_grad():
        want = choose_forward(model)([batch.group for batch in batches], [1.0, 1.0]).numpy()
    got = np.concatenate([np.asarray(batch.sampler_logps) for batch in batches])
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_before_there_are_such_weights_it_samples_with_the_first(model: PreTrainedModel) -> None:
    sampler = LaggedSampler(config(), model, make_tokenizer(), 2)
    for step in range(2):
        sampler.keep(step, model.state_dict())
    assert {batch.policy_version for batch in sampler.sample(1)} == {0}


def test_the_same_numbers_come_every_time_and_the_lag_changes_them(model: PreTrainedModel) -> None:
    def run(lag: int) -> Outcome:
        return train(config(), [copy.deepcopy(model) for _ in range(3)], make_tokenizer(), lag)

    fresh = run(0)
    assert fresh.kl > 0 and fresh.entropy > 0
    assert run(0) == fresh
    assert run(1) != fresh


def test_the_table_has_a_column_for_every_figure() -> None:
    cells = [[Outcome(0.5, 0.1, 0.2, 0.01), Outcome(0.7, 0.3, 0.4, 0.03)]] * 2
    line = row("tis", cells)
    assert line == "| tis | 0.60 (0.50 to 0.70) | 0.60 (0.50 to 0.70) | 0.20 | 0.30 | 2.0% |"
    names, rule = header([0, 4]).splitlines()
    assert names.count("|") == rule.count("|") == line.count("|")
