"""Checkpoints go from one process to several ranks, and back: what one of them wrote the other reads."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import PreTrainedModel

from policy_trainer.learner.learner import Learner
from policy_trainer.learner.optimizer import Weights
from policy_trainer.ranks.checkpoint import SHARDS, read_weights
from policy_trainer.ranks.sharding import materialise
from policy_trainer.run_files.checkpoint import read_saved
from shared.devices import choose_device
from shared.models import load_empty
from shared.settings import Dtype

_FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
# Of AdamW, for each weight.
_MOMENTS = ("exp_avg", "exp_avg_sq")


def divide_saved(learner: Learner, checkpoint: Path, rank: int) -> None:
    """All ranks call it together, each with its number. Gives them a share of the masters and of the optimizer of one
    process, and the random state; the model is read before, as any other. Rank 0 has all of it in main memory."""
    saved, names = read_saved(checkpoint), list(learner.weights.stepped)
    model, optimizer = learner.model, learner.weights.optimizer
    torch.set_rng_state(saved.rng)
    if saved.masters:
        set_model_state_dict(model, {} if rank else dict(saved.masters), options=_FROM_RANK_0)
    if states := saved.optimizer["state"]:
        groups = [{**group, "params": names} for group in optimizer.state_dict()["param_groups"]]
        whole = {"state": {name: states[place] for place, name in enumerate(names)}, "param_groups": groups}
        set_optimizer_state_dict(model, optimizer, {} if rank else whole, options=_FROM_RANK_0)


def load_from_shards(checkpoint: Path, *, device: str, dtype: Dtype) -> PreTrainedModel:
    """The whole model of a checkpoint that ranks wrote. Raises UserError for a device that does not exist."""
    model = load_empty(str(checkpoint), revision=None, dtype=dtype)
    materialise(model, choose_device(device))
    read_weights_alone(model, checkpoint)
    return model


def read_weights_alone(model: PreTrainedModel, checkpoint: Path) -> None:
    """`read_weights` in one process. Each tensor is rounded to the precision that the model has."""
    with _alone():
        read_weights(model, checkpoint)


def restore_from_shards(weights: Weights, checkpoint: Path) -> None:
    """Restores what training steps, with the optimizer and the random state, in one process."""
    moments = {
        name: {"step": torch.zeros(()), **{moment: torch.empty_like(own, device="cpu") for moment in _MOMENTS}}
        for name, own in weights.stepped.items()
    }
    values = {name: torch.empty_like(own, device="cpu") for name, own in weights.stepped.items()}
    state = {"model": values, "optimizer": {"state": moments}, "rng": torch.get_rng_state()}
    with _alone():
        load(state, checkpoint_id=checkpoint / SHARDS)
    weights.load(values)
    groups = weights.optimizer.state_dict()["param_groups"]
    weights.optimizer.load_state_dict({"state": dict(enumerate(moments.values())), "param_groups": groups})
    torch.set_rng_state(state["rng"])


@contextmanager
def _alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # so it is
        yield
