"""What each rank of `tests.bench.ranks` runs: a step, of which it counts the memory and the communication."""

import gc
import json
import random
import sys
import weakref
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from policy_trainer.config import TrainConfig
from policy_trainer.ranks.rank import Rank, load_rank
from policy_trainer.ranks.sharding import Costs, parts_of_rank
from policy_trainer.ranks.world import join_world
from shared.batch import RolloutBatch
from tests.chaos.batches import random_batch

# Of a step, and the tokens of each.
GROUPS, TOKENS, COMPLETION_TOKENS = 8, 12, 4
_COLLECTIVES = {"_allgather_base_": "gathers", "_reduce_scatter_base_": "scatters"}


@dataclass(frozen=True)
class Share:
    """Of one rank, in bytes: its shards; all tensors that are there after a step; the most at a time within one.

    forwards: of a step. calls, whole: collectives by name, and the bytes of the whole tensors that they make or take.
    """

    parameters: int
    gradients: int
    moments: int
    allocated: int
    peak: int
    forwards: int
    calls: dict[str, int]
    whole: dict[str, int]


class Counted(TorchDispatchMode):
    """Counts collectives, and the bytes of all storages that are there, also of those that FSDP2 empties."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.calls = dict.fromkeys([*_COLLECTIVES.values(), "others"], 0)
        self.whole = dict.fromkeys(self.calls, 0)
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._meet(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again with the local tensors
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
        self._meet(tensors)
        if func.namespace in ("c10d", "_c10d_functional") and func._opname != "wait_tensor":
            name = _COLLECTIVES.get(func._opname, "others")
            self.calls[name] += 1
            self.whole[name] += max(tensor.nbytes for tensor in tensors)
        return result

    def _meet(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            self._storages.setdefault(storage._cdata, weakref.ref(storage, self._forget(storage._cdata)))
        alive = (storage() for storage in self._storages.values())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive if storage is not None))

    def _forget(self, key: int) -> Any:
        return lambda _: self._storages.pop(key, None)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors if tensor is not None)


def all_tensors() -> list[Tensor]:
    gc.collect()
    return [one for one in gc.get_objects() if issubclass(type(one), Tensor) and one.device.type != "meta"]


def batches() -> list[RolloutBatch]:
    """Of one size, so that every number of ranks up to theirs has as many each."""
    chance = random.Random(0)
    made = [random_batch(chance, "bench", longest=1) for _ in range(GROUPS)]
    return [replace(one, sampler_logps=np.full(len(one.group.completion_ids), -5.5, np.float32)) for one in made]


def measure(rank: Rank, groups: list[RolloutBatch], forwards: int) -> Share:
    learner, model = rank.learner, rank.model
    learner.step(groups, step=0)  # makes the moments
    with Counted(all_tensors()) as counted:
        learner.step(groups, step=1)
    storages = {local(one).untyped_storage()._cdata: local(one).untyped_storage() for one in all_tensors()}
    states = learner.weights.optimizer.state.values()
    return Share(
        parameters=nbytes(model.parameters()),
        gradients=nbytes(parameter.grad for parameter in model.parameters()),
        moments=nbytes(state[name] for state in states for name in ("exp_avg", "exp_avg_sq")),
        allocated=sum(storage.nbytes() for storage in storages.values()),
        peak=counted.peak,
        forwards=forwards,
        calls=counted.calls,
        whole=counted.whole,
    )


def main() -> None:
    directory = Path(sys.argv[1])
    config = TrainConfig(**json.loads((directory / "settings.json").read_text()))
    with join_world("cpu", 60) as world:
        rank, _ = load_rank(config, config.model, None, None, world, {})
        groups = batches()
        tokens, costs = [one.group for one in groups], Costs.of(rank.model)
        parts = parts_of_rank(tokens, world.rank, world.size, config.micro_batch_tokens, costs)
        share = measure(rank, groups, len(parts))
        shares = world.gather_bytes(json.dumps(asdict(share)).encode())
        if world.rank == 0:
            (directory / "shares.json").write_text(json.dumps([json.loads(one) for one in shares]))
        else:
            world.hear()  # that this was all


if __name__ == "__main__":
    main()
