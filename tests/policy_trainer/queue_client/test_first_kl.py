"""Whether the reference is the policy's own beginning: of equal models in two precisions, and of models that differ."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from policy_trainer.config import LoraConfig, LossConfig, OptimizerConfig, ReferenceConfig, TrainConfig
from policy_trainer.learner.learner import Learner
from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.queue_client.first_kl import choose_first_kl
from shared.api import ModelInfo
from shared.logprobs import PackedForward

Make = Callable[..., Any]
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def check(policy: PreTrainedModel, reference: PreTrainedModel, make_scored: Make, /, **settings: Any) -> str | None:
    """What is said of the first batch of a policy that the reference has scored."""
    config = TrainConfig(model="ours", **settings)
    prompt = [3, 4]
    completions = [np.random.default_rng(row).integers(2, 64, 9).tolist() for row in range(4)]
    unscored = make_scored(prompt, completions, [0.0, 1.0, 0.0, 1.0])
    with torch.no_grad():
        logps = PackedForward(reference)([unscored.rollout.group], [1.0]).float().numpy()
    batch = make_scored(prompt, completions, [0.0, 1.0, 0.0, 1.0], ref_logps=logps)
    learner = Learner(
        policy,
        PackedForward(policy),
        loss=LossConfig(beta=0.1),
        optimizer=OptimizerConfig(),
        steps=1,
        micro_batch_tokens=1000,
        max_completion_length=9,
    )
    info = ModelInfo.model_construct(name="theirs", dtype=NAMES[reference.dtype], teacher=None)
    judge = choose_first_kl(config, info, NAMES[policy.dtype])
    return judge.check(learner.kl([batch]), learner.noise_floor([batch]))


@pytest.mark.parametrize("policy", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reference", [torch.float32, torch.bfloat16])
def test_equal_models_are_never_refused(
    policy: torch.dtype, reference: torch.dtype, make_tiny: Make, make_scored: Make
) -> None:
    for seed in range(3):
        said = check(make_tiny(seed=seed, dtype=policy), make_tiny(seed=seed, dtype=reference), make_scored)
        assert said and "the policy begins as the reference" in said and "nats a token" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_model_is_refused_with_both_figures_and_what_to_do(
    dtype: torch.dtype, make_tiny: Make, make_scored: Make
) -> None:
    with pytest.raises(RunFailed) as refused:
        check(make_tiny(dtype=dtype), make_tiny(seed=1, dtype=dtype), make_scored)
    said = str(refused.value)
    assert "theirs" in said and "nats a token (rounding alone: " in said
    assert "ref-server serve --model ours" in said and "--expect-reference different" in said
    assert len(said.splitlines()) <= 5


def test_so_is_one_that_was_trained_a_little(make_tiny: Make, make_scored: Make) -> None:
    policy = make_tiny()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    with pytest.raises(RunFailed):
        check(policy, make_tiny(), make_scored)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"expect_reference": "different"}, "KL to the reference before the first update: "),
        ({"loss": LossConfig(beta=0)}, None),
        (
            {"loss": LossConfig(beta=0, advantage="distill"), "teacher": "t"},
            "KL to the teacher before the first update: ",
        ),
        (
            {"lora": LoraConfig(rank=2), "reference": ReferenceConfig(source="adapter-off")},
            "the reference is the policy without its adapters",
        ),
    ],
)
def test_another_model_on_purpose_or_without_a_penalty_is_not(
    settings: dict[str, Any], said: str | None, make_tiny: Make, make_scored: Make
) -> None:
    answer = check(make_tiny(), make_tiny(seed=1), make_scored, **settings)
    assert answer is said is None or (answer and said and answer.startswith(said))
