"""One rank's part of a policy, from the trainer's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from policy_trainer.config import TrainConfig
from policy_trainer.learner.adapters import adapt, has_adapters
from policy_trainer.learner.gradient_checkpointing import checkpoint_layers
from policy_trainer.learner.groups import PartWeights
from policy_trainer.learner.learner import Learner
from policy_trainer.ranks.sharded_checkpoint import divide_saved, has_shards, read_optimizer, read_weights
from policy_trainer.ranks.sharding import (
    Costs,
    ShardedForward,
    ShardedRanks,
    divide_again,
    load_sharded,
    read_model,
    tied_names,
)
from policy_trainer.ranks.world import World
from policy_trainer.sampling.hf import HFSampler
from shared.errors import UserError
from shared.logprobs import choose_forward
from shared.models import load_tokenizer


@dataclass(frozen=True, eq=False)
class Rank:
    """compute: the dtype of its forwards. ties: names of tensors that have another name, too, and that name."""

    world: World
    learner: Learner
    sampler: HFSampler
    compute: torch.dtype
    ties: Mapping[str, str]

    @property
    def model(self) -> PreTrainedModel:
        return self.learner.model


def load_rank(
    config: TrainConfig,
    source: str,
    revision: str | None,
    checkpoint: Path | None,
    world: World,
    part_weights: PartWeights,
) -> tuple[Rank, str]:
    """A rank's part, and what its forward is called. All ranks call it together.

    source: a model, or the checkpoint's directory. part_weights: of the rewards, by name. Raises UserError for a model
    that cannot be used.
    """
    if config.optimizer.offload != "none":
        raise UserError("optimizer.offload: under torchrun the ranks divide the optimizer's memory: leave it out")
    sharded = checkpoint if checkpoint and has_shards(checkpoint) else None

    def prepare(model: PreTrainedModel) -> None:
        adapt(model, config)
        if config.gradient_checkpointing:
            checkpoint_layers(model)

    def adapt_whole(whole: PreTrainedModel) -> None:
        adapt(whole, config, None if sharded else checkpoint)

    masters = config.optimizer.master_weights == "float32"
    model, compute = load_sharded(
        source, revision=revision, dtype=config.dtype, masters=masters, world=world, prepare=prepare
    )
    if sharded is None or has_adapters(model):
        read_model(model, source, revision=revision, dtype=config.dtype, world=world, adapt=adapt_whole)
    if sharded:
        read_weights(model, sharded)
    forward = choose_forward(model, lambda plain: ShardedForward(model, plain), compute)
    divide_again(model)
    ranks = ShardedRanks(model, world, Costs.of(model))
    learner = Learner(model, forward, config, part_weights=part_weights, ranks=ranks)
    if sharded:
        read_optimizer(learner, sharded)
    elif checkpoint:
        divide_saved(learner, checkpoint, world.rank)
    sampler = HFSampler(model, load_tokenizer(source, revision=revision))
    return Rank(world, learner, sampler, compute, tied_names(model)), forward.name
