"""`policy_trainer.trl` gives TRL's loss: its settings for a configuration of TRL against TRL's trainer, in float64."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from policy_trainer.config import LossConfig
from policy_trainer.trl import GRPOConfig
from policy_trainer.trl.mapping import settings
from policy_trainer.trl.steps import count_steps
from tests.policy_trainer.proofs.cases import random_groups
from tests.policy_trainer.proofs.formulas import loss_and_gradient
from tests.policy_trainer.proofs.oracle import teaches
from tests.policy_trainer.proofs.trl_cases import assert_same, on_terms_of_trl
from tests.policy_trainer.proofs.trl_trainers import _ARGUMENTS, _DEFAULTS, Trl

pytestmark = pytest.mark.slow  # TRL takes seconds to import

CASES = 10
# Tokens of the longest completion that dr_grpo counts.
LONGEST = 8
VLLM: dict[str, Any] = {"use_vllm": True}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"loss_type": "grpo"},
        {"loss_type": "bnpo"},
        {"loss_type": "dr_grpo", "scale_rewards": False},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "num_iterations": 2},
        {"loss_type": "cispo", "epsilon_high": 1.3, "num_iterations": 2},
        {"loss_type": "cispo", "num_iterations": 2},
        {"loss_type": "sapo", "sapo_temperature_neg": 1.5, "num_iterations": 2},
        {"loss_type": "vespo", "vespo_k_pos": 1.0, "num_iterations": 2},
        {"beta": 0.1},
        {"beta": 0.1, "use_bias_correction_kl": False, "loss_type": "grpo"},
        {"scale_rewards": "batch"},
        {"scale_rewards": "none", "mask_truncated_completions": True},
        {"epsilon": 0.1, "epsilon_high": 0.28, "delta": 1.5, "num_iterations": 2},
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2, "beta": 0.2},
        {"entropy_coef": 0.05},
        {"top_entropy_quantile": 0.37},
        {"off_policy_mask_threshold": 0.1, "num_iterations": 2},
        VLLM,
        {**VLLM, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.2},
        {**VLLM, "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.5},
        {**VLLM, "vllm_importance_sampling_mode": "sequence_truncate", "loss_type": "grpo"},
        {**VLLM, "vllm_importance_sampling_correction": False},
    ],
)
def test_a_configuration_of_trl_has_trls_loss(given: dict[str, Any]) -> None:
    args = GRPOConfig("out", max_steps=4, max_completion_length=LONGEST, **given)
    steps = count_steps(args, None)
    config = LossConfig(**settings(args, steps, in_chat=True, evaluates=False)["loss"])
    theirs = {name: getattr(args, name) for name in {*_DEFAULTS, *_ARGUMENTS} & {*vars(args)}}
    theirs |= {"epsilon_low": args.epsilon, "has_old": config.old_logps == "recomputed"}
    theirs["epsilon_high"] = args.epsilon if args.epsilon_high is None else args.epsilon_high
    theirs["scale_rewards"] = {False: "none"}.get(args.scale_rewards, args.scale_rewards)
    rng, compared = random.Random(5), 0
    while compared < CASES:
        groups = random_groups(rng, count=3, size=4, noise=0.4, unfinished=0.2)
        groups = [group for group in groups if teaches(group, config)]
        if not groups:
            continue
        rows, factor = on_terms_of_trl(groups, config)
        trainer = Trl(**{**theirs, "entropy_coef": args.entropy_coef / factor})
        assert_same(loss_and_gradient(groups, config, LONGEST), trainer.loss(rows), factor)
        compared += 1
