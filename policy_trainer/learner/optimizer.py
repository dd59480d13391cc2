"""The optimizer: its learning rate at each step, and the weights that it steps.

These are the model's own weights, or float32 master weights that are rounded to its bfloat16 weights after each step.

bfloat16 has 8 significant bits: a step of less than about 2^-9 of a weight is rounded away. Master weights accumulate
such steps (Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, 3.1).
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import PreTrainedModel

from policy_trainer.config import OptimizerConfig
from shared.errors import UserError

PURE_BFLOAT16 = (
    "training in pure bfloat16: steps below 2^-9 of a weight vanish, and second moments hardly decay at a beta2 above "
    'about 0.99; optimizer.master_weights = "float32" avoids both'
)


class Weights(Protocol):
    """stepped: the parameters that the optimizer steps, by their names in the model; a tied weight once.
    masters: those that are not parameters of the model; checkpoints save them."""

    stepped: dict[str, nn.Parameter]
    masters: dict[str, nn.Parameter]
    optimizer: AdamW

    def step(self) -> None:
        """One optimizer step on `stepped`; the model then has the new weights."""
        ...


def make_weights(model: PreTrainedModel, config: OptimizerConfig) -> Weights:
    """Chooses by the model's dtype and optimizer.master_weights. Raises UserError for float16."""
    if model.dtype == torch.float16:
        raise UserError(
            "dtype: the model is in float16, whose gradients vanish without loss scaling; train in bfloat16"
        )
    # float32 weights need no masters.
    kind = _KINDS[config.master_weights] if model.dtype == torch.bfloat16 else OwnWeights
    return kind(model, config)


def clip_gradients(weights: Weights, config: OptimizerConfig) -> float:
    """Clips the gradients to max_grad_norm. Returns their norm before clipping."""
    limit = config.max_grad_norm or math.inf
    return float(torch.nn.utils.clip_grad_norm_(weights.stepped.values(), limit))


def step_weights(weights: Weights, config: OptimizerConfig, lr: float) -> None:
    for group in weights.optimizer.param_groups:
        # Set all of them: a resumed optimizer has those of the checkpoint, and the settings may have changed.
        group.update(lr=lr, betas=config.betas, weight_decay=config.weight_decay)
    weights.step()


def lr_factor(step: int, config: OptimizerConfig, steps: int) -> float:
    """Learning rate of a step as a fraction of the peak: a linear ramp times a decay over the whole run.

    It depends on the step's number alone, so that resuming needs no state.
    """
    warmup = max(config.warmup_steps, math.ceil(config.warmup_ratio * steps))
    ramp = min(1.0, (step + 1) / warmup) if warmup else 1.0
    progress = min(1.0, step / max(steps - 1, 1))
    return ramp * (1 - (1 - config.min_lr_rate) * SCHEDULES[config.lr_scheduler_type](progress))


def _linear(progress: float) -> float:
    return progress


def _cosine(progress: float) -> float:
    return (1 - math.cos(math.pi * progress)) / 2


# (progress of the run in [0, 1]) -> share of the decay that is done, in [0, 1].
SCHEDULES: dict[str, Callable[[float], float]] = {"linear": _linear, "cosine": _cosine}


class OwnWeights:
    """The optimizer steps the model's parameters."""

    def __init__(self, model: PreTrainedModel, config: OptimizerConfig) -> None:
        self.stepped = dict(model.named_parameters())
        self.masters: dict[str, nn.Parameter] = {}
        self.optimizer = _adamw(self.stepped.values(), config)

    def step(self) -> None:
        self.optimizer.step()


class MasterWeights:
    """The optimizer steps float32 copies. Gradients of each backward are accumulated in float32, then freed."""

    def __init__(self, model: PreTrainedModel, config: OptimizerConfig) -> None:
        self._rounded = dict(model.named_parameters())
        self.masters = {name: _master(parameter) for name, parameter in self._rounded.items()}
        self.stepped = self.masters
        self.optimizer = _adamw(self.masters.values(), config)

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        for name, parameter in self._rounded.items():
            parameter.copy_(self.masters[name])


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """A float32 copy that accumulates the parameter's gradients."""
    master = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
    parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))
    return master


def _move_gradient(master: nn.Parameter, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None


def _adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> AdamW:
    return AdamW(parameters, betas=config.betas, weight_decay=config.weight_decay, fused=True)


_KINDS: dict[str, type[OwnWeights] | type[MasterWeights]] = {"float32": MasterWeights, "none": OwnWeights}
