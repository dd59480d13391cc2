"""Rank 0 runs the trainer; the others execute its commands.

The trainer does not notice: it has a learner and a sampler. Commands are JSON and the wire format of batches, never
pickles.
"""

import json
import signal
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.algorithms.objective.entropy import EntropyBonus
from policy_trainer.algorithms.objective.group import Group
from policy_trainer.config import TrainConfig
from policy_trainer.data.completion import Completion, Probe
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.learner.adapters import adapt, has_adapters, save_whole, write_description
from policy_trainer.learner.gradient_checkpointing import checkpoint_layers
from policy_trainer.learner.groups import PartWeights
from policy_trainer.learner.interface import LoadedLearner
from policy_trainer.learner.learner import Learner
from policy_trainer.learner.optimizer import trained
from policy_trainer.learner.ranks.sharded_checkpoint import (
    divide_saved,
    has_shards,
    read_optimizer,
    read_weights,
    write_shards,
)
from policy_trainer.learner.ranks.sharding import (
    ShardedForward,
    ShardedRanks,
    divide_again,
    load_sharded,
    read_model,
    tied_names,
    trained_state,
    whole_state,
    whole_weights,
)
from policy_trainer.learner.ranks.world import World
from policy_trainer.learner.step_stats import StepStats
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import RunningBatch, SamplingParams
from shared import wire
from shared.batch import Array, Batch, TokenGroup
from shared.errors import UserError
from shared.logprobs import choose_forward
from shared.models import load_outline, load_tokenizer


@dataclass(frozen=True, eq=False)
class Rank:
    """compute: the dtype of its forwards. ties: see `tied_names`."""

    world: World
    learner: Learner
    sampler: HFSampler
    compute: torch.dtype
    ties: Mapping[str, str]


def load_rank(
    config: TrainConfig,
    source: str,
    revision: str | None,
    checkpoint: Path | None,
    world: World,
    part_weights: PartWeights,
) -> tuple[Rank, str]:
    """A rank's part, and the name of its forward. All ranks call it together.

    source: a model, or the checkpoint's directory. Raises UserError for a model that cannot be used.
    """
    if config.optimizer.offload != "none":
        raise UserError("optimizer.offload: under torchrun the ranks divide the optimizer's memory", "leave it out")
    sharded = checkpoint if checkpoint and has_shards(checkpoint) else None

    def prepare(model: PreTrainedModel) -> None:
        adapt(model, config)
        if config.gradient_checkpointing:
            checkpoint_layers(model)

    def adapt_whole(whole: PreTrainedModel) -> None:
        adapt(whole, config, None if sharded else checkpoint)

    if config.optimizer.master_weights == "saved":
        raise UserError("optimizer.master_weights: ranks save in the model's precision", "set float32 or none")
    masters = config.optimizer.has_masters
    model, compute = load_sharded(
        source, revision=revision, dtype=config.dtype, masters=masters, world=world, prepare=prepare
    )
    if sharded is None or has_adapters(model):
        read_model(model, source, revision=revision, dtype=config.dtype, world=world, adapt=adapt_whole)
    if sharded:
        read_weights(model, sharded)
    forward = choose_forward(model, lambda plain: ShardedForward(model, plain), compute)
    divide_again(model)
    ranks = ShardedRanks(model, world)
    learner = Learner(model, forward, config, part_weights=part_weights, ranks=ranks)
    if sharded:
        read_optimizer(learner, sharded)
    elif checkpoint:
        divide_saved(learner, checkpoint, world.rank)
    sampler = HFSampler(model, load_tokenizer(source, revision=revision))
    return Rank(world, learner, sampler, compute, tied_names(model)), forward.name


class Lead:
    """The learner of rank 0's trainer. model: an outline; its weights are divided among the ranks."""

    def __init__(self, rank: Rank, outline: PreTrainedModel) -> None:
        self.model = outline
        self._rank = rank

    def step(
        self,
        batches: Sequence[Batch],
        *,
        step: int,
        on_groups: Callable[[Sequence[Group]], None] = lambda groups: None,
    ) -> StepStats:
        with self._rank.world.together():
            _send(self._rank, "step", batches, step=step)
            return self._rank.learner.step(batches, step=step, on_groups=on_groups)

    @property
    def updated(self) -> bool:
        return self._rank.learner.updated

    def failures(self, batches: Sequence[Batch], *, step: int) -> None:
        """None: the other ranks wait in the middle of the step that raised, so the job must end."""

    @property
    def bonus(self) -> EntropyBonus:
        return self._rank.learner.bonus  # the same on all ranks

    def restore_bonus(self, coef: float, entropy: float) -> None:
        _execute(self._rank, "restore_bonus", coef=coef, entropy=entropy)

    def kl(self, batches: Sequence[Batch]) -> float:
        return _execute(self._rank, "kl", batches)

    def noise_floor(self, batches: Sequence[Batch]) -> float:
        return _execute(self._rank, "noise_floor", batches)

    def logps(self, batches: Sequence[Batch]) -> list[Array]:
        return _execute(self._rank, "logps", batches)

    def probe(self, batches: Sequence[Batch]) -> Probe:
        return _execute(self._rank, "probe", batches)

    def state(self) -> dict[str, Tensor]:
        return _execute(self._rank, "state")

    def parameters(self) -> dict[str, Tensor]:
        return _execute(self._rank, "parameters")

    def write(self, tokenizer: PreTrainedTokenizerBase, directory: Path) -> Future[Any]:
        """Writes the model's configuration and the tokenizer at once, the ranks' shards in the background."""
        write_description(self.model, tokenizer, directory)
        return _execute(self._rank, "write", directory=str(directory.resolve()))

    def save(self, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
        """As a Hugging Face model."""
        save_whole(self.model, tokenizer, directory, _execute(self._rank, "whole"))


class LeadSampler:
    """Samples with all ranks, each its share of the rows; for evaluations, whose sampling is greedy."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    @contextmanager
    def running_batch(self, params: SamplingParams, seed: int) -> Iterator[RunningBatch]:
        world = self._rank.world
        with world.together():
            _send(self._rank, "sample", (), params=asdict(params), seed=seed)
            with whole_weights(self._rank.learner.model):
                try:
                    with self._rank.sampler.running_batch(params, seed) as batch:
                        yield LeadBatch(world, batch)
                finally:
                    world.send("returned", {})

    def load(self, model: Path) -> None:
        raise NotImplementedError("the learner trains these weights")

    def logps(self, group: TokenGroup) -> np.ndarray:
        raise NotImplementedError("the learner has them")


class LeadBatch:
    """A running batch in parts, one on each rank. New rows go to the rank that has the fewest."""

    def __init__(self, world: World, part: RunningBatch) -> None:
        """part: of this rank."""
        self._world = world
        self._part = part
        self._ranks: dict[int, int] = {}  # of each unfinished row
        self._added: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, rows: Sequence[int], prompt: EncodedPrompt, max_tokens: int) -> None:
        counts = Counter(self._ranks.values())
        rank = min(range(self._world.size), key=counts.__getitem__)
        self._ranks |= dict.fromkeys(rows, rank)
        fields = {"rows": [*rows], "max_tokens": max_tokens, **_prompt_fields(prompt)}
        self._added.append({"rank": rank, **fields})

    def advance(self) -> list[tuple[int, Completion]]:
        if not self._ranks:
            return []
        added, self._added = self._added, []
        self._world.send("advance", {"added": added})
        ended = _advance(self._world, self._part, added)
        for row, _ in ended:
            del self._ranks[row]
        return ended


def load_lead(
    config: TrainConfig,
    source: str,
    revision: str | None,
    checkpoint: Path | None,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    part_weights: PartWeights,
) -> LoadedLearner:
    """Loads the policy on all ranks. Arguments as of `load_rank`; world: this is its rank 0."""
    with world.together():
        settings = config.model_dump(mode="json")
        where = None if checkpoint is None else str(checkpoint.resolve())
        names = {"source": source, "revision": revision, "checkpoint": where}
        world.send("load", {"config": settings, **names, "part_weights": dict(part_weights)})
        rank, form = load_rank(config, source, revision, checkpoint, world, part_weights)
    outline = load_outline(source, revision=revision).to(rank.compute)  # type: ignore[arg-type]
    adapt(outline, config)
    learner = Lead(rank, outline)
    write, save = partial(learner.write, tokenizer), partial(learner.save, tokenizer)
    return LoadedLearner(learner, LeadSampler(rank), write, save, form)


def follow(world: World) -> int:
    """Executes the commands of rank 0 until its last. Returns the exit status that rank 0 chose."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 ends the job, between steps
    command, header, _ = world.receive()
    if command == "end":
        return header["status"]
    checkpoint = header["checkpoint"] and Path(header["checkpoint"])
    config = TrainConfig(**header["config"])
    weights = header["part_weights"]
    rank, _ = load_rank(config, header["source"], header["revision"], checkpoint, world, weights)
    while True:
        command, header, bodies = world.receive()
        if command == "end":
            return header["status"]
        _COMMANDS[command](rank, [wire.decode(body) for body in bodies], **header)


def _send(rank: Rank, command: str, batches: Sequence[Batch], **header: Any) -> None:
    rank.world.send(command, header, [wire.encode(batch) for batch in batches])


def _execute(rank: Rank, command: str, batches: Sequence[Batch] = (), **header: Any) -> Any:
    """Sends a command to the other ranks and executes it with them."""
    with rank.world.together():
        _send(rank, command, batches, **header)
        return _COMMANDS[command](rank, batches, **header)


def _state(rank: Rank) -> dict[str, Tensor]:
    return trained_state(rank.learner.model, rank.compute) if has_adapters(rank.learner.model) else _whole(rank)


def _whole(rank: Rank) -> dict[str, Tensor]:
    return whole_state(rank.learner.model, rank.compute, rank.ties)


def _parameters(rank: Rank) -> dict[str, Tensor]:
    names = trained(rank.learner.model)
    whole = whole_state(rank.learner.model, torch.float32, rank.ties)
    return {name: weight for name, weight in whole.items() if name in names}


def _sample(rank: Rank, params: SamplingParams, seed: int) -> None:
    """Samples this rank's rows of a LeadBatch."""
    with whole_weights(rank.learner.model), rank.sampler.running_batch(params, seed) as part:
        while True:
            command, header, _ = rank.world.receive()
            if command == "returned":
                return
            _advance(rank.world, part, header["added"])


def _advance(world: World, part: RunningBatch, added: Sequence[Mapping[str, Any]]) -> list[tuple[int, Completion]]:
    """The rows that have ended on any rank. Called on all ranks, each of which has its part of the batch."""
    for each in added:
        if each["rank"] == world.rank:
            part.add(each["rows"], _prompt(each["ids"], each["images"]), each["max_tokens"])
    written = json.dumps([(row, _fields(completion)) for row, completion in part.advance()]).encode()
    parts = [json.loads(gathered) for gathered in world.gather_bytes(written)]
    return [(row, _completion(**fields)) for gathered in parts for row, fields in gathered]


def _prompt_fields(prompt: EncodedPrompt) -> dict[str, Any]:
    """What sampling with transformers takes of a prompt, as JSON can hold it."""
    images = {name: np.ascontiguousarray(tensor) for name, tensor in prompt.images.items()}
    return {"ids": prompt.ids, "images": b64encode(save(images)).decode() if images else ""}


def _prompt(ids: list[int], images: str) -> EncodedPrompt:
    return EncodedPrompt(ids, load(b64decode(images)) if images else {})


def _fields(completion: Completion) -> dict[str, Any]:
    ids, logps = completion.ids.tolist(), completion.logps.tolist()
    return {"ids": ids, "logps": logps, "finished": completion.finished, "eos": completion.eos}


def _completion(ids: list[int], logps: list[float], finished: bool, eos: bool) -> Completion:
    return Completion(np.array(ids, np.int64), np.array(logps, np.float32), finished, eos)


# Each is called with the rank, the batches and the header's values.
_COMMANDS: Mapping[str, Callable[..., Any]] = {
    "step": lambda rank, batches, step: rank.learner.step(batches, step=step),
    "restore_bonus": lambda rank, batches, coef, entropy: rank.learner.restore_bonus(coef, entropy),
    "kl": lambda rank, batches: rank.learner.kl(batches),
    "noise_floor": lambda rank, batches: rank.learner.noise_floor(batches),
    "logps": lambda rank, batches: rank.learner.logps(batches),
    "probe": lambda rank, batches: rank.learner.probe(batches),
    "state": lambda rank, batches: _state(rank),
    "whole": lambda rank, batches: _whole(rank),
    "parameters": lambda rank, batches: _parameters(rank),
    "write": lambda rank, batches, directory: write_shards(rank.learner, Path(directory), rank.world.files),
    "sample": lambda rank, batches, params, seed: _sample(
        rank, SamplingParams(**{**params, "stop": tuple(params["stop"])}), seed
    ),
}
