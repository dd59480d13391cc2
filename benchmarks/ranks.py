"""Memory and communication of a policy on 1, 2 and 4 ranks, compared with formulas: `python -m benchmarks.ranks`.

Prints the table of docs/fsdp.md. Bytes are counted, not timed, so a busy machine changes nothing.
"""

import gc
import json
import random
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.measure import show
from policy_trainer.cli.demo.base_model import make_tokenizer
from policy_trainer.config import OptimizerConfig, TrainConfig
from policy_trainer.learner.ranks.lead import Rank, load_rank
from policy_trainer.learner.ranks.sharding import forward_cost, parts_of_rank
from policy_trainer.learner.ranks.world import join_world
from policy_trainer.trainer import memory
from policy_trainer.trainer.memory import Shape, Work
from shared.batch import Batch
from shared.models import save_model
from shared.process import child_environment
from tests.harness.batches import random_batch

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
    return [tensor for tensor in gc.get_objects() if issubclass(type(tensor), Tensor) and tensor.device.type != "meta"]


def make_batches() -> list[Batch]:
    """Of one size, so that every number of ranks up to theirs has as many each."""
    chance = random.Random(0)
    made = [random_batch(chance, "bench", longest=1) for _ in range(GROUPS)]
    return [replace(batch, sampler_logps=np.full(len(batch.group.completion_ids), -5.5, np.float32)) for batch in made]


def measure_rank(rank: Rank, groups: list[Batch], forwards: int) -> Share:
    learner, model = rank.learner, rank.learner.model
    learner.step(groups, step=0)  # makes the moments
    with Counted(all_tensors()) as counted:
        learner.step(groups, step=1)
    storages = {local(tensor).untyped_storage()._cdata: local(tensor).untyped_storage() for tensor in all_tensors()}
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


def work() -> None:
    directory = Path(sys.argv[1])
    config = TrainConfig(**json.loads((directory / "settings.json").read_text()))
    with join_world("cpu", 60) as world:
        rank, _ = load_rank(config, config.model, None, None, world, {})
        groups = make_batches()
        tokens, cost = [batch.group for batch in groups], forward_cost(rank.learner.model)
        parts = parts_of_rank(tokens, world.rank, world.size, config.micro_batch_tokens, cost)
        share = measure_rank(rank, groups, len(parts))
        shares = world.gather_bytes(json.dumps(asdict(share)).encode())
        if world.rank == 0:
            (directory / "shares.json").write_text(json.dumps([json.loads(share) for share in shares]))
        else:
            world.receive()  # that this was all


WIDTHS = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Case:
    """micro_batches: of a rank in a step, which has GROUPS groups."""

    ranks: int
    dtype: str = "float32"
    micro_batches: int = 1

    @property
    def groups(self) -> int:
        """Of one micro-batch."""
        return GROUPS // self.ranks // self.micro_batches


CASES = (Case(1), Case(2), Case(4), Case(2, micro_batches=2), Case(2, "bfloat16"), Case(4, "bfloat16"))


def make_model(directory: Path, *, hidden: int = 256) -> Shape:
    """A Qwen2 with random weights, every matrix of which four ranks can divide."""
    config = Qwen2Config(
        vocab_size=320, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    save_model(model, make_tokenizer(), directory / "model")
    return Shape.of(model)


def measure(case: Case, directory: Path) -> list[Share]:
    """What each rank counted, with the model in `directory`."""
    settings = {
        "model": str(directory / "model"), "dtype": case.dtype, "max_steps": 10, "loss": {"beta": 0.0},
        "micro_batch_tokens": case.groups * TOKENS,
    }  # fmt: skip
    (directory / "settings.json").write_text(json.dumps(settings))
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks), "-m")
    command = [sys.executable, "-m", *launcher, "benchmarks.ranks", str(directory)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    assert not done.returncode, done.stderr[-4000:]
    return [Share(**share) for share in json.loads((directory / "shares.json").read_text())]


def planned(case: Case, shape: Shape) -> tuple[int, int]:
    """Bytes of a rank between steps, and the most within one, by the formulas of `policy-trainer doctor --plan`."""
    width, optimizer = WIDTHS[case.dtype], OptimizerConfig()
    work = Work(tokens=case.groups * TOKENS, completions=case.groups * COMPLETION_TOKENS, device="cpu")
    if case.ranks == 1:
        parts = memory.training(shape, width, optimizer, work, recompute=False)
    else:
        parts = memory.divided(shape, width, optimizer, ranks=case.ranks, micro_batches=case.micro_batches)
        parts["activations"] = memory.activations(shape, width, work, recompute=False)
    return parts["weights"] + parts["gradients"] + parts["AdamW"], sum(parts.values())


def sent(case: Case, share: Share) -> int:
    """Bytes that a rank sends for weights and gradients, and receives: of a whole tensor all but its own part."""
    return (share.whole["gathers"] + share.whole["scatters"]) * (case.ranks - 1) // case.ranks


def _row(case: Case, shares: Sequence[Share], shape: Shape) -> list[str]:
    share = max(shares, key=lambda share: share.peak)
    between, most = planned(case, shape)
    moved = memory.traffic(shape, WIDTHS[case.dtype], ranks=case.ranks, micro_batches=case.micro_batches)
    pairs = ((share.allocated, between), (share.peak, most), (sent(case, share), moved))
    calls = f"{share.calls['gathers']} + {share.calls['scatters']}"
    numbers = [f"{measured / 1e6:.2f} ({arithmetic / 1e6:.2f})" for measured, arithmetic in pairs]
    return [str(case.ranks), case.dtype, str(case.micro_batches), *numbers, calls]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        shape = make_model(Path(name))
        rows = [_row(case, measure(case, Path(name)), shape) for case in CASES]
    show(
        f"{shape.parameters / 1e6:.2f}M parameters in {shape.layers} layers; in brackets what is planned",
        ["ranks", "dtype", "micro-batches", "between steps, MB", "most, MB", "sent, MB", "gathers + scatters"],
        rows,
    )


if __name__ == "__main__":
    work() if len(sys.argv) > 1 else main()
