"""FSDP2: weights, gradients and optimizer states are divided among the ranks, and whole only where they are used.

Each layer's weights are gathered before it computes and dropped after it, in the forward and in the backward (Zhao et
al., PyTorch FSDP, arXiv 2304.11277; `fully_shard` of torch.distributed.fsdp).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from policy_trainer.learner.adapters import vision_tower
from policy_trainer.learner.gradient_checkpointing import layers_of
from policy_trainer.learner.micro_batches import Ranks, cut
from policy_trainer.learner.optimizer import trained
from policy_trainer.learner.ranks.world import World
from shared.batch import TokenGroup
from shared.errors import UserError
from shared.logprobs import LogprobForward, language_model
from shared.models import load_empty, load_model
from shared.settings import Dtype

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def shard(model: PreTrainedModel, world: World, compute: torch.dtype) -> None:
    """Divides a model's parameters, which may still be on the meta device, among the ranks.

    compute: the dtype of forward and backward. Gradients are summed, not averaged, in float32.
    Raises UserError for a model whose layers transformers does not mark as such.
    """
    # The tower's layers stay with the rest: they compute only on ranks whose groups have images.
    layers = layers_of(language_model(model))
    if not layers:
        raise UserError(f"model: {type(model).__name__} has no layers that could be sharded", "train on one device")
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


class ShardedForward:
    """A forward that runs inside the model's forward, where its weights are whole."""

    def __init__(self, model: PreTrainedModel, forward: LogprobForward) -> None:
        self.name = f"{forward.name}, sharded"
        self._model: Any = model
        tower = set(vision_tower(model))

        def complete(groups: Sequence[TokenGroup], logps: Float[Tensor, " C"]) -> Float[Tensor, " C"]:
            """All ranks reduce gradients of the same weights: without images, those of the tower are 0."""
            if not tower or any(group.images for group in groups):
                return logps
            weights = (weight for name, weight in trained(model).items() if _is_within(name, tower))
            return sum(((0 * weight).sum() for weight in weights), logps)

        def token_logps(groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Float[Tensor, " C"]:
            return complete(groups, forward(groups, temperatures))

        def token_logps_with_entropy(
            groups: Sequence[TokenGroup], temperatures: Sequence[float], *, entropy_grad: bool
        ) -> tuple[Tensor, Tensor]:
            logps, entropy = forward.with_entropy(groups, temperatures, entropy_grad=entropy_grad)
            return complete(groups, logps), entropy

        model.token_logps = token_logps  # type: ignore[assignment]
        model.token_logps_with_entropy = token_logps_with_entropy  # type: ignore[assignment]
        for method in ("token_logps", "token_logps_with_entropy"):
            register_fsdp_forward_method(model, method)

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Float[Tensor, " C"]:
        return self._model.token_logps(groups, temperatures)

    def with_entropy(
        self, groups: Sequence[TokenGroup], temperatures: Sequence[float], *, entropy_grad: bool = True
    ) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
        return self._model.token_logps_with_entropy(groups, temperatures, entropy_grad=entropy_grad)


def _is_within(name: str, parts: Set[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


Cost = Callable[[TokenGroup], float]


def forward_cost(model: PreTrainedModel) -> Cost:
    """Floating-point operations of a group's forward: its prompt once, and completions that attend to it and to
    themselves."""
    config = model.config.get_text_config()
    embedding: Any = model.get_input_embeddings().weight
    head: Any = model.get_output_embeddings()
    looked_up = 0 if head is None or head.weight is embedding else embedding.numel()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Of a token in all layers and the head, and of a query and a key that it attends to in all layers.
    of_token = 2.0 * (sum(parameter.numel() for parameter in model.parameters()) - looked_up)
    of_pair = 4.0 * config.num_hidden_layers * config.num_attention_heads * width

    def cost(group: TokenGroup) -> float:
        prompt, lengths = len(group.prompt_ids), group.completion_lengths.astype(np.float64)
        pairs = prompt**2 / 2 + float((lengths * (prompt + lengths / 2)).sum())
        return of_token * group.tokens + of_pair * pairs

    return cost


def share(groups: Sequence[TokenGroup], ranks: int, cost: Cost) -> list[list[int]]:
    """The places of each rank's groups. The costliest group first, to the rank that has the least to do (Graham's LPT,
    at most 4/3 of the best). The same on every rank."""
    weights = [cost(group) for group in groups]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for place in sorted(range(len(groups)), key=lambda place: (-weights[place], place)):
        rank = loads.index(min(loads))
        shares[rank].append(place)
        loads[rank] += weights[place]
    return [sorted(places) for places in shares]


def parts_of_rank(
    groups: Sequence[TokenGroup], rank: int, ranks: int, limit: int, cost: Cost
) -> list[tuple[Sequence[int], bool]]:
    """A rank's forwards. Each rank has as many: those that it lacks repeat the smallest group, and do not count."""
    cuts = [
        [places[part] for part in cut([groups[place].tokens for place in places], limit)]
        for places in share(groups, ranks, cost)
    ]
    smallest = min(range(len(groups)), key=lambda place: groups[place].tokens)
    missing = max(map(len, cuts)) - len(cuts[rank])
    return [*((part, True) for part in cuts[rank]), *[([smallest], False)] * missing]


class ShardedRanks(Ranks):
    """Gives each rank of a sharded model a share of the groups."""

    def __init__(self, model: PreTrainedModel, world: World) -> None:
        self._model = cast(FSDPModule, model)
        self._world = world
        self._cost = forward_cost(model)

    def parts(self, groups: Sequence[TokenGroup], limit: int) -> Iterator[tuple[Sequence[int], bool]]:
        parts = parts_of_rank(groups, self._world.rank, self._world.size, limit, self._cost)
        for number, part in enumerate(parts):
            # Gradients of earlier parts are added up here, and cross the network once.
            self._model.set_requires_gradient_sync(number == len(parts) - 1)
            yield part

    def gather(self, tensor: Shaped[Tensor, "*shape"]) -> list[Shaped[Tensor, "*shape"]]:
        return self._world.gather(tensor)


@contextmanager
def whole_weights(model: PreTrainedModel) -> Iterator[None]:
    """Within it each rank has all weights in the compute dtype, so that it may do forwards that the others do not."""
    modules = _sharded(model)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(module is not model, recurse=False)
        divide_again(model)


def whole_state(model: PreTrainedModel, dtype: torch.dtype, ties: Mapping[str, str]) -> dict[str, Tensor]:
    """A copy of all weights on rank 0's CPU; empty on the others, which must call it, too. ties: names of tensors that
    are others' under a second name."""
    state = cast(Mapping[str, Tensor], get_model_state_dict(model, options=_WHOLE))
    # The whole tensor of a single rank is the parameter itself.
    copies = {name: tensor.to(dtype, copy=True) for name, tensor in state.items() if name not in ties}
    return {name: copies[ties.get(name, name)] for name in state}


def trained_state(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """A copy of what trains, on the CPU of every rank; all of them must call it."""
    whole = {name: cast(DTensor, weight.detach()).full_tensor() for name, weight in trained(model).items()}
    return {name: weight.to("cpu", dtype, copy=True) for name, weight in whole.items()}


def divide_again(model: nn.Module) -> None:
    """After forwards without a backward: the outermost weights stay whole until then, and are not the parameters that
    an optimizer steps."""
    for module in _sharded(model):
        module.reshard()


def _sharded(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def load_sharded(
    name: str,
    *,
    revision: str | None,
    dtype: Dtype,
    masters: bool,
    world: World,
    prepare: Callable[[PreTrainedModel], None],
) -> tuple[PreTrainedModel, torch.dtype]:
    """A model with memory for its weights, divided among the ranks, and the dtype that it computes in.

    masters: keep what trains of a bfloat16 model in float32. prepare: called with the model before it is divided.
    """
    model = load_empty(name, revision=revision, dtype=dtype)
    compute = model.dtype
    prepare(model)
    if masters and compute == torch.bfloat16:
        for parameter in trained(model).values():
            parameter.data = parameter.data.float()
    shard(model, world, compute)
    materialise(model, world.device)
    return model, compute


def read_model(
    model: PreTrainedModel,
    name: str,
    *,
    revision: str | None,
    dtype: Dtype,
    world: World,
    adapt: Callable[[PreTrainedModel], None],
) -> None:
    """Fills a sharded model. Rank 0 reads the weights, and has all of them in main memory for a moment.

    adapt: adds the adapters that the sharded model has.
    """
    dtypes = {key: tensor.dtype for key, tensor in model.state_dict().items()}
    state: dict[str, Any] = {}
    if world.rank == 0:
        whole = load_model(name, revision=revision, device="cpu", dtype=dtype)
        adapt(whole)
        state = {key: tensor.to(dtypes[key]) for key, tensor in whole.state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def materialise(model: PreTrainedModel, device: torch.device) -> None:
    """Memory for a model, or this rank's shards of it; buffers keep their values."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    model.tie_weights()
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def tied_names(model: nn.Module) -> dict[str, str]:
    """Second names of parameters, and their first names."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: known for name, weight in named if (known := first.setdefault(id(weight), name)) != name}
