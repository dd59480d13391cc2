"""Checkpoints of a sharded policy: each rank reads its part, and writes it in the background of training.

PyTorch's distributed checkpoints name every tensor and what part of it a file has, so any number of ranks reads them.
A run may go from one process to several ranks, and back: each reads what the other wrote.
"""

import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
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
from policy_trainer.learner.optimizer import Weights
from policy_trainer.learner.ranks.sharding import materialise
from policy_trainer.run_files.checkpoint import read_saved
from shared.devices import choose_device
from shared.models import SHARDS, load_empty
from shared.settings import Dtype

_FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
# Of AdamW, for each weight.
_MOMENTS = ("exp_avg", "exp_avg_sq")


def write_shards(learner: Learner, directory: Path, group: dist.ProcessGroup) -> Future[Any]:
    """All ranks call it together. Returns once the state is copied to main memory; a thread writes it, and
    the ranks agree at its end.

    group: only for the writers, since training continues meanwhile.
    """
    model, optimizer = get_state_dict(learner.model, learner.weights.optimizer)
    weights = _without_frozen(learner.model, model)
    state = {"model": weights, "optimizer": optimizer, "rng": torch.get_rng_state()}
    future = async_save(state, checkpoint_id=directory / SHARDS, process_group=group)
    assert isinstance(future, Future)
    return future


def has_shards(directory: Path) -> bool:
    return (directory / SHARDS).is_dir()


def read_weights(model: PreTrainedModel, directory: Path) -> None:
    """All ranks call it together, or a single process. Restores the weights."""
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


def _without_frozen(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Weights of the base, to which adapters are added, are in no checkpoint."""
    frozen = _frozen(model)
    return {name: tensor for name, tensor in state.items() if name not in frozen}


def _frozen(model: nn.Module) -> set[str]:
    """Also second names of tied weights."""
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def divide_saved(learner: Learner, checkpoint: Path, rank: int) -> None:
    """All ranks call it together, each with its number. Gives them a share of the masters and of the optimizer of one
    process, and the random state; the model is read before. Rank 0 has all of it in main memory."""
    (saved, rng, masters), names = read_saved(checkpoint), list(learner.weights.stepped)
    model, optimizer = learner.model, learner.weights.optimizer
    torch.set_rng_state(rng)
    if masters:
        set_model_state_dict(model, {} if rank else dict(masters), options=_FROM_RANK_0)
    if states := saved["state"]:
        groups = [{**group, "params": names} for group in optimizer.state_dict()["param_groups"]]
        whole = {"state": {name: states[place] for place, name in enumerate(names)}, "param_groups": groups}
        set_optimizer_state_dict(model, optimizer, {} if rank else whole, options=_FROM_RANK_0)


def load_from_shards(checkpoint: Path, *, device: str, dtype: Dtype) -> PreTrainedModel:
    """The whole model of a checkpoint that ranks wrote. Raises UserError for a device that does not exist."""
    model = load_empty(str(checkpoint), revision=None, dtype=dtype)
    materialise(model, choose_device(device))
    read_weights_in_one_process(model, checkpoint)
    return model


def read_weights_in_one_process(model: PreTrainedModel, checkpoint: Path) -> None:
    """`read_weights` in one process. Each tensor is rounded to the precision that the model has."""
    with _one_process():
        read_weights(model, checkpoint)


def restore_from_shards(weights: Weights, checkpoint: Path) -> None:
    """Restores the stepped weights, the optimizer and the random state in one process."""
    moments = {
        name: {"step": torch.zeros(()), **{moment: torch.empty_like(weight, device="cpu") for moment in _MOMENTS}}
        for name, weight in weights.stepped.items()
    }
    values = {name: torch.empty_like(weight, device="cpu") for name, weight in weights.stepped.items()}
    state = {"model": values, "optimizer": {"state": moments}, "rng": torch.get_rng_state()}
    with _one_process():
        load(state, checkpoint_id=checkpoint / SHARDS)
    weights.load(values)
    groups = weights.optimizer.state_dict()["param_groups"]
    weights.optimizer.load_state_dict({"state": dict(enumerate(moments.values())), "param_groups": groups})
    torch.set_rng_state(state["rng"])


@contextmanager
def _one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # so it is
        yield
