"""The optimizer: its learning rate at each step, and the weights that it steps.

These are the model's own weights, float32 master weights that are rounded to its bfloat16 weights after each step, or
float32 copies in main memory.

bfloat16 has 8 significant bits: a step of less than about 2^-9 of a weight is rounded away. Master weights accumulate
such steps (Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, 3.1).
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW
from transformers import PreTrainedModel, get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from policy_trainer.config import OptimizerConfig, TrainConfig
from policy_trainer.learner.host_memory import add, begin, host_memory
from shared.errors import UserError
from shared.spelling import spell_name

PURE_BFLOAT16 = (
    "training in pure bfloat16: steps below 2^-9 of a weight vanish, and second moments hardly decay at a beta2 above "
    'about 0.99; optimizer.master_weights = "float32" avoids both'
)
# Names of parameters that transformers' Trainer does not decay (Trainer.get_decay_parameter_names).
_UNDECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
OFFLOADED_FROM_CPU = (
    "optimizer.offload: the model is in main memory itself (device cpu), so a copy there saves nothing; set it to none"
)


class Weights:
    """Steps the model's parameters.

    stepped: the parameters that the optimizer steps, by their names in the model; a tied weight once.
    masters: those that are not parameters of the model; checkpoints save them. saves_masters: whether they are saved as
    the model's weights. undecayed: names in `stepped` that have no weight decay.
    """

    def __init__(
        self, stepped: dict[str, nn.Parameter], masters: dict[str, nn.Parameter], config: OptimizerConfig
    ) -> None:
        self.stepped = stepped
        self.masters = masters
        self.saves_masters = bool(masters) and config.master_weights == "saved"
        self.optimizer = AdamW(stepped.values(), betas=config.betas, weight_decay=config.weight_decay, fused=True)
        self.undecayed: frozenset[str] = frozenset()

    def finish_gradients(self) -> None:
        """Waits until `stepped` has the gradients of all backwards so far."""

    def step(self) -> None:
        """One optimizer step on `stepped`; the model then has the new weights."""
        self.optimizer.step()

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Sets weights of `stepped` by their names; the model then has them, too."""
        _set(self.stepped, values)


def make_weights(model: PreTrainedModel, config: OptimizerConfig) -> Weights:
    """Raises UserError for a float16 model."""
    if model.dtype == torch.float16:
        raise UserError(
            "dtype: the model is in float16, whose gradients vanish without loss scaling", "train in bfloat16"
        )
    weights = _weights(model, config)
    if config.weight_decay and not config.decay_norms_and_biases:
        weights.undecayed = frozenset(weights.stepped) - decayed(model)
    return weights


def _weights(model: PreTrainedModel, config: OptimizerConfig) -> Weights:
    if config.offload == "cpu":
        return OffloadedWeights(model, config)
    parameters = trained(model)
    if config.has_masters and _dtype(parameters) == torch.bfloat16:
        return MasterWeights(model, config)
    return Weights(parameters, {}, config)


def decayed(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that transformers' Trainer decays: all but biases and the weights of norms."""
    return frozenset(get_parameter_names(model, [nn.LayerNorm], _UNDECAYED))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name; a tied weight once. With adapters the model's other weights are frozen."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def clip_gradients(weights: Weights, config: OptimizerConfig) -> float:
    """Clips the gradients to max_grad_norm. Returns their norm before clipping."""
    weights.finish_gradients()
    limit = config.max_grad_norm or math.inf
    norm = torch.nn.utils.clip_grad_norm_(weights.stepped.values(), limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def step_weights(weights: Weights, config: OptimizerConfig, lr: float) -> None:
    decay = 0.0 if weights.undecayed else config.weight_decay
    for group in weights.optimizer.param_groups:
        # Set all of them: a resumed optimizer has those of the checkpoint, and the settings may have changed.
        group.update(lr=lr, betas=config.betas, eps=config.adam_epsilon, weight_decay=decay)
    if weights.undecayed:  # decay the others here, as AdamW does: this avoids a second parameter group in checkpoints
        with torch.no_grad():
            for name, weight in weights.stepped.items():
                if name not in weights.undecayed and weight.grad is not None:
                    weight.mul_(1 - lr * config.weight_decay)
    weights.step()


def learning_rates(step: int, config: TrainConfig) -> list[float]:
    """The learning rate of each update of a step. The first step is 0; the run's last may have fewer updates."""
    per_step = config.updates_per_step
    first, last = step * per_step, config.max_steps * per_step
    if config.max_updates:
        last = min(last, config.max_updates)
    count = min(per_step, max(last - first, 1)) if config.max_updates else per_step
    factors = (lr_factor(first + i, config.optimizer, last, per_step=per_step) for i in range(count))
    return [config.optimizer.learning_rate * factor for factor in factors]


def lr_factor(update: int, config: OptimizerConfig, updates: int, *, per_step: int = 1) -> float:
    """Learning rate of an update as a fraction of the peak: a linear warmup times a decay over the whole run.

    update: its number; the first is 0. updates: updates in the run. per_step: updates in a step; warmup_steps counts
    steps. The result depends only on the update's number, so that resuming needs no state. Raises UserError for a
    schedule that transformers does not have, and for one that depends on the loss.
    """
    warmup = max(config.warmup_steps * per_step, math.ceil(config.warmup_ratio * updates))
    if config.lr_scheduler_type == "transformers":
        return _transformers_factor(update, config, updates, warmup)
    ramp = min(1.0, (update + 1) / warmup) if warmup else 1.0
    progress = min(1.0, update / max(updates - 1, 1))
    decayed = (1 - math.cos(math.pi * progress)) / 2 if config.lr_scheduler_type == "cosine" else progress
    return ramp * (1 - (1 - config.min_lr_rate) * decayed)


def _transformers_factor(update: int, config: OptimizerConfig, updates: int, warmup: int) -> float:
    given = {"num_warmup_steps": warmup, **config.lr_scheduler_kwargs}
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=config.learning_rate)  # the schedules read its learning rate
    try:
        scheduler: Any = get_scheduler(
            given.pop("name"),
            optimizer,
            num_warmup_steps=given.pop("num_warmup_steps"),
            num_training_steps=updates,
            scheduler_specific_kwargs=given,
        )
        return scheduler.lr_lambdas[0](update)
    except (ValueError, TypeError, AttributeError) as error:  # AttributeError: a schedule that depends on the loss
        raise UserError(f"{spell_name('optimizer.lr_scheduler_kwargs')}: {error}") from None


class MasterWeights(Weights):
    """The optimizer steps float32 copies. Gradients of each backward are accumulated in float32, then freed."""

    def __init__(self, model: PreTrainedModel, config: OptimizerConfig) -> None:
        self._rounded = trained(model)
        masters = {
            name: nn.Parameter(parameter.detach().to(torch.float32, copy=True))
            for name, parameter in self._rounded.items()
        }
        super().__init__(masters, masters, config)
        for name, parameter in self._rounded.items():
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, masters[name]))

    def step(self) -> None:
        super().step()
        _set(self._rounded, self.masters)

    def load(self, values: Mapping[str, Tensor]) -> None:
        super().load(values)
        _set(self._rounded, values)


class OffloadedWeights(Weights):
    """The optimizer steps float32 copies in main memory, where its moments are too. Gradients move there and are added
    up during the backward, so that the device only holds the weights (ZeRO-Offload, Ren et al., arXiv 2101.06840)."""

    def __init__(self, model: PreTrainedModel, config: OptimizerConfig) -> None:
        self._resident = trained(model)
        self._memory = host_memory(model.device)
        self._gradients = self._empty()
        stepped = {name: nn.Parameter(copy) for name, copy in self._empty().items()}
        _set(stepped, self._resident)
        # The weights of a float32 model are equal to their copies, so its checkpoints need no others.
        super().__init__(stepped, {} if _dtype(self._resident) == torch.float32 else stepped, config)
        for name, parameter in self._resident.items():
            parameter.register_post_accumulate_grad_hook(partial(self._take_gradient, name))

    def finish_gradients(self) -> None:
        self._memory.wait()

    def step(self) -> None:
        super().step()
        self._return_weights()

    def load(self, values: Mapping[str, Tensor]) -> None:
        super().load(values)
        self._return_weights()

    def _empty(self) -> dict[str, Tensor]:
        """A float32 tensor in main memory for each parameter, all in one block: locking pages is slow."""
        sizes = [parameter.numel() for parameter in self._resident.values()]
        parts = self._memory.empty(sum(sizes)).split(sizes)
        named = zip(self._resident.items(), parts, strict=True)
        return {name: part.view(parameter.shape) for (name, parameter), part in named}

    def _take_gradient(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        stepped, total = self.stepped[name], self._gradients[name]
        self._memory.run(begin if stepped.grad is None else add, total, parameter.grad)
        stepped.grad, parameter.grad = total, None

    @torch.no_grad()
    def _return_weights(self) -> None:
        for name, parameter in self._resident.items():
            # Rounded on the device, which is faster than rounding on the CPU before the copy.
            parameter.copy_(self.stepped[name].to(parameter.device, non_blocking=True))
        self._memory.wait()


def _dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    return next(iter(weights.values())).dtype


@torch.no_grad()
def _set(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        weights[name].copy_(value)


def _move_gradient(master: nn.Parameter, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None
