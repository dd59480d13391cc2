"""Prompts with pictures: log-probs, loss and gradient of a step against TRL's GRPOTrainer, which runs the same weights.

TRL repeats a prompt and its pictures for each completion, pads prompts on the left and completions on the right, and
computes positions and features of pictures itself. The models are float64, but TRL's LM head rounds to float32.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.config import TrainConfig
from policy_trainer.learner.adapters import adapt, vision_tower
from policy_trainer.learner.learner import Learner
from shared.batch import Array, Batch
from shared.logprobs import choose_forward
from tests.policy_trainer.learner.test_vision import batches, config_of
from tests.policy_trainer.proofs.trl_cases import LOSS_TYPES
from tests.policy_trainer.proofs.trl_trainers import Trl
from tests.rounding import rounding
from tests.shared.logprobs.vision_families import IMAGE, make_vision

pytestmark = pytest.mark.slow  # TRL takes seconds to import

BETA, CLIP, MAX_TOKENS = 0.1, 0.05, 8


@pytest.mark.parametrize("frozen", [False, True], ids=["whole", "frozen tower"])
@pytest.mark.parametrize(
    ("name", "loss_type"),
    [
        ("qwen2_vl", "grpo"),
        ("qwen2_vl", "dapo"),
        ("qwen2_vl", "dr_grpo"),
        ("qwen2_5_vl", "grpo"),
        ("qwen3_vl", "grpo"),
        ("qwen3_5", "grpo"),
    ],
)
def test_a_step_is_the_same(name: str, loss_type: str, frozen: bool) -> None:
    """Two prompts with two pictures each, and one without, in one batch."""
    given = batches(make_vision(name, torch.float64))
    config = config_of(
        freeze_vision_tower=frozen,
        loss={"beta": BETA, "epsilon": CLIP, "old_logps": "sampler", **LOSS_TYPES[loss_type]},
        optimizer={"learning_rate": 1e-2, "max_grad_norm": 1e9},  # clips nothing
        sampling={"max_completion_length": MAX_TOKENS},
    )
    ours, theirs = (make_policy(name, config) for _ in range(2))
    forward = choose_forward(ours)
    with torch.no_grad():
        logps = forward([batch.group for batch in given], [1.0] * len(given))
    stats = Learner(ours, forward, config).step(given, step=0)
    their_logps, their_loss = trl_step(theirs, given, loss_type=loss_type, max_completion_length=MAX_TOKENS)
    assert_same(logps, their_logps)
    assert stats.metrics["clip_ratio"] > 0
    # A mean of advantages, which cancel, and of the KL: these are of the size 1.
    assert stats.metrics["loss"] == pytest.approx(float(their_loss), rel=0, abs=rounding(1.0, layers=0))
    assert gradients(ours).keys() == gradients(theirs).keys()
    assert any(key.startswith(tuple(vision_tower(ours))) for key in gradients(ours)) != frozen
    assert_same(*(torch.cat([grad.flatten() for grad in gradients(model).values()]) for model in (ours, theirs)))


def make_policy(name: str, config: TrainConfig) -> PreTrainedModel:
    model = make_vision(name, torch.float64)
    adapt(model, config)
    return model


def trl_step(model: PreTrainedModel, given: Sequence[Batch], **settings: Any) -> tuple[Tensor, Tensor]:
    """(C,) log-probs of all completions, and the loss, whose gradient is left in the model."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model.train(), outputs=("log_probs", "entropy"))
    inputs = trl_inputs(given)
    theirs = Trl(beta=BETA, epsilon_low=CLIP, epsilon_high=CLIP, **settings)
    trainer = theirs.of_model(model, rows=len(inputs["prompt_ids"]))
    with torch.no_grad():
        logps, *_ = trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            inputs["completion_ids"].shape[1],
            batch_size=5,  # TRL cuts rows and their pictures; a part without any would fail there
            **{key: inputs[key] for key in ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")},
        )
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    return logps[inputs["completion_mask"].bool()], loss.detach()


def trl_inputs(given: Sequence[Batch]) -> dict[str, Any]:
    """What TRL's `_generate_and_score_completions` returns."""
    rollouts = given
    groups = [rollout.group for rollout in rollouts]
    rows = [group for group in groups for _ in range(group.size)]
    prompts = [group.prompt_ids for group in rows]
    completions = [ids for group in groups for ids in group.completions()]
    seen = [group.images for group in rows if group.images]
    prompt_ids, completion_ids = padded(prompts, "left"), padded(completions)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": padded([np.ones_like(ids) for ids in prompts], "left"),
        "completion_ids": completion_ids,
        "completion_mask": padded([np.ones_like(ids) for ids in completions]),
        "advantages": torch.cat([trl_advantages(torch.tensor(rollout.rewards)) for rollout in rollouts]),
        "old_per_token_logps": padded(
            [row for rollout in rollouts for row in rows_of(rollout.sampler_logps, rollout.group.completion_lengths)]
        ),
        "ref_per_token_logps": padded(
            [row for batch in given for row in rows_of(batch.ref_logps, batch.group.completion_lengths)]
        ),
        "num_items_in_batch": torch.tensor(sum(map(len, completions))),
        "pixel_values": torch.tensor(np.concatenate([images["pixel_values"] for images in seen])).double(),
        "image_grid_thw": torch.tensor(np.concatenate([images["image_grid_thw"] for images in seen])),
        "num_images": [len(group.images.get("image_grid_thw", ())) for group in rows],
        "mm_token_type_ids": torch.cat([prompt_ids == IMAGE, torch.zeros_like(completion_ids)], 1).int(),
    }


def trl_advantages(rewards: Tensor) -> Tensor:
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def rows_of(values: Array | None, lengths: Array) -> list[Array]:
    assert values is not None
    return np.split(values, np.cumsum(lengths)[:-1])


def padded(rows: Sequence[Array], side: str = "right") -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_side=side)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def assert_same(got: Tensor, wanted: Tensor) -> None:
    assert (got - wanted).abs().max() <= rounding(wanted.abs().max(), layers=0)
