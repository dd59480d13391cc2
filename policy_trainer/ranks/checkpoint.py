"""Checkpoints of a sharded policy: each rank writes and reads its own part, beside training.

PyTorch's distributed checkpoints name every tensor and what part of it a file has, so any number of ranks reads them.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from transformers import PreTrainedModel

from policy_trainer.learner.learner import Learner

# Below the checkpoint's directory, which also has the model's configuration and its tokenizer.
SHARDS = "shards"


class ShardsWriting:
    """The `Writing` of all ranks' parts. They agree at its end, on rank 0's word."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


def write_shards(learner: Learner, directory: Path, group: dist.ProcessGroup) -> ShardsWriting:
    """All ranks call it together. Returns once the state is copied to main memory; a thread writes it.

    group: for the writers alone, since training goes on meanwhile.
    """
    future = async_save(_state(learner), checkpoint_id=directory / SHARDS, process_group=group)
    assert isinstance(future, Future)
    return ShardsWriting(future)


def has_shards(directory: Path) -> bool:
    return (directory / SHARDS).is_dir()


def read_weights(model: PreTrainedModel, directory: Path) -> None:
    """All ranks call it together, or one process alone. Restores the weights."""
    state = {"model": _without_frozen(model, get_model_state_dict(model))}
    load(state, checkpoint_id=directory / SHARDS)
    options = StateDictOptions(strict=not _frozen(model))
    set_model_state_dict(model, state["model"], options=options)


def read_optimizer(learner: Learner, directory: Path) -> None:
    """All ranks call it together. Restores the optimizer and the random state."""
    model, optimizer = learner.model, learner.weights.optimizer
    state = {"optimizer": get_optimizer_state_dict(model, optimizer), "rng": torch.get_rng_state()}
    load(state, checkpoint_id=directory / SHARDS)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    torch.set_rng_state(state["rng"])


def _state(learner: Learner) -> dict[str, Any]:
    model, optimizer = get_state_dict(learner.model, learner.weights.optimizer)
    weights = _without_frozen(learner.model, model)
    return {"model": weights, "optimizer": optimizer, "rng": torch.get_rng_state()}


def _without_frozen(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Weights that adapters stand beside are the base's, and in no checkpoint."""
    frozen = _frozen(model)
    return {name: tensor for name, tensor in state.items() if name not in frozen}


def _frozen(model: nn.Module) -> set[str]:
    """Also second names of tied weights."""
    return {name for name, own in model.named_parameters(remove_duplicate=False) if not own.requires_grad}
