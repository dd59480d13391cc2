"""A supervised step against transformers' own loss, however it is cut into micro-batches."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.config import OptimizerConfig
from policy_trainer.supervised.sft import SupervisedLearner
from shared.batch import TokenGroup
from shared.logprobs import PackedForward, PaddedForward, PlainForward
from tests.rounding import rounding

Make = Callable[..., PreTrainedModel]
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.5)


def random_rows(seed: int, count: int = 6) -> list[TokenGroup]:
    chance = np.random.default_rng(seed)

    def row() -> TokenGroup:
        prompt, completion = chance.integers(1, 12, size=2)
        ids = chance.integers(0, 64, size=prompt + completion)
        return TokenGroup(ids[:prompt], ids[prompt:], np.array([completion]))

    return [row() for _ in range(count)]


def labelled_loss(model: PreTrainedModel, rows: Sequence[TokenGroup]) -> Tensor:
    """transformers' own: right-padded rows, and -100 where nothing is learnt."""
    width = max(row.tokens for row in rows)
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        ids[i, : row.tokens] = torch.tensor(np.concatenate([row.prompt_ids, row.completion_ids]))
        mask[i, : row.tokens] = 1
        labels[i, len(row.prompt_ids) : row.tokens] = torch.tensor(row.completion_ids)
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss


def learner(
    model: PreTrainedModel, forward: Any = PackedForward, limit: int = 10_000, **changes: Any
) -> SupervisedLearner:
    optimizer = OPTIMIZER.model_copy(update=changes)
    return SupervisedLearner(model, forward(model), optimizer=optimizer, micro_batch_tokens=limit)


@pytest.mark.parametrize("forward", [PackedForward, PaddedForward, PlainForward])
@pytest.mark.parametrize("limit", [1, 30, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_transformers(make_tiny: Make, forward: Any, limit: int, seed: int) -> None:
    model, rows = make_tiny(seed=seed, dtype=torch.float64), random_rows(seed)
    theirs = copy.deepcopy(model)
    loss = labelled_loss(theirs, rows)
    loss.backward()

    ours = learner(model, forward, limit, max_grad_norm=0.0)
    stats = ours.step(rows, lr=0.0)

    # They round logits to float32.
    assert stats["loss"] == pytest.approx(float(loss.detach()), abs=rounding(float(loss.detach()), layers=0))
    assert stats["tokens"] == sum(len(row.completion_ids) for row in rows)
    gradients = dict(model.named_parameters())
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        bound = rounding(parameter.grad.abs().max())
        torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=0, atol=bound)
    assert ours.evaluate(rows)["eval_loss"] == pytest.approx(stats["loss"], abs=1e-9)


def test_steps_are_those_of_adamw_on_that_loss(make_tiny: Make) -> None:
    model = make_tiny(dtype=torch.float64)
    theirs = copy.deepcopy(model)
    adamw = torch.optim.AdamW(theirs.parameters(), betas=OPTIMIZER.betas, weight_decay=OPTIMIZER.weight_decay)
    ours = learner(model)
    for step, lr in enumerate((1e-2, 5e-3, 1e-3)):
        rows = random_rows(step)
        adamw.zero_grad()
        labelled_loss(theirs, rows).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), OPTIMIZER.max_grad_norm)
        adamw.param_groups[0]["lr"] = lr
        adamw.step()

        stats = ours.step(rows, lr=lr)

        assert stats["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert (
            stats["learning_rate"] == lr and stats["grad_norm"] > OPTIMIZER.max_grad_norm
        )  # there was something to clip
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], parameter, rtol=1e-4, atol=1e-6)
