"""What the processes of a run need in memory, what limits their speed, and what does not fit; nothing is loaded."""

import copy
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from policy_trainer.config import INLINE, TrainConfig
from policy_trainer.data.prompts import prompt_limit
from policy_trainer.learner.adapters import adapt
from policy_trainer.trainer import memory
from policy_trainer.trainer.memory import Parts, Shape
from policy_trainer.trainer.reference_servers import reference_device
from shared.devices import choose_device
from shared.errors import UserError
from shared.models import load_outline
from shared.spelling import spell_setting

MAIN_MEMORY = "main memory"


def memory_size(place: str, gpu_bytes: int | None) -> int | None:
    """Bytes of a memory; None if unknown: elsewhere, and the main memory of a machine with GPUs of `gpu_bytes`."""
    if place == MAIN_MEMORY:
        return None if gpu_bytes else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if gpu_bytes is None and place in {f"cuda:{index}" for index in range(torch.cuda.device_count())}:
        return torch.cuda.get_device_properties(place).total_memory
    return gpu_bytes


_WIDTHS = {"float32": 4, "bfloat16": 2}
# ref-server's default of scoring_tokens.
_SCORING_TOKENS = 16_384


class Unplanned(UserError):
    """The plan cannot be made because a model's sizes are unknown. A run may start without a plan."""


@dataclass(frozen=True)
class Need:
    """What one process needs in one memory. limit: what its speed depends on; empty if another row has it."""

    process: str
    memory: str
    parts: Parts
    limit: str = ""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def at_least(self) -> "Need":
        """Without the parts that only long completions need in full."""
        return replace(self, parts={name: size for name, size in self.parts.items() if name not in memory.AT_MOST})


def plan(
    config: TrainConfig,
    outline: PreTrainedModel,
    gpu_bytes: int | None,
    ranks: int = 1,
    teacher: PreTrainedModel | None = None,
) -> list[Need]:
    """outline: the model's shapes. gpu_bytes: memory of each GPU; None for the devices of this machine. ranks: that
    torchrun divides the policy among. teacher: the shapes of config.teacher.

    Raises UserError for a device that this machine lacks, if gpu_bytes is None, and for what ranks cannot do; Unplanned
    for a model whose sizes cannot be read.
    """
    device, reference = _devices(config, gpu_bytes)
    work = _Work.of(config, outline)
    policy = copy.deepcopy(outline)
    adapt(policy, config)
    shape, trained = (_shape(model, config) for model in (outline, policy))
    width = _WIDTHS.get(config.dtype, outline.dtype.itemsize)
    trainer = _trainer if ranks == 1 else partial(_rank, ranks=ranks)
    return [
        *trainer(config, trained, width, work, device),
        *_reference(config, shape, teacher, width, work, reference),
        *_worker(config, shape, width, work, device, gpu_bytes),
    ]


def _shape(model: PreTrainedModel, config: TrainConfig) -> Shape:
    try:
        return Shape.of(model, in_4bit=config.lora.load_in_4bit)
    except Exception as error:  # an architecture may name its sizes in any way
        raise Unplanned(f"model: its memory needs are unknown: {type(error).__name__}: {error}") from error


def load_teacher_outline(config: TrainConfig) -> PreTrainedModel | None:
    """The shapes of the teacher of the trainer's own server, if it has one. Raises UserError."""
    return None if config.teacher is None else load_outline(config.teacher, revision=None)


@dataclass(frozen=True)
class _Work:
    """Tokens if every prompt and completion is as long as it may be. group_completions: completion tokens of a group.
    step: tokens of a step."""

    completion: int
    group: int
    group_completions: int
    step: int

    @classmethod
    def of(cls, config: TrainConfig, outline: PreTrainedModel) -> "_Work":
        completion = config.sampling.max_completion_length
        completions = config.sampling.num_generations * completion
        group = prompt_limit(outline, config) + completions
        return cls(completion, group, completions, config.groups_per_step * group)

    def micro_batches(self, budget: int, parts: int) -> int:
        """Of one of so many equal parts of a step."""
        groups = -(-self.step // (self.group * parts))
        return -(-groups // max(1, budget // self.group))

    def forward(self, budget: int) -> dict[str, int]:
        """Tokens of the largest forward: whole groups up to a budget, or one that is larger."""
        groups = max(1, min(budget, self.step) // self.group)
        return {"tokens": groups * self.group, "completion_tokens": groups * self.group_completions}


def _devices(config: TrainConfig, gpu_bytes: int | None) -> tuple[str, str]:
    """Of the policy, and of the reference."""
    if gpu_bytes is None:
        policy = str(choose_device(config.device))
        # Not checked: the server, which starts there, refuses a device that does not exist.
        return policy, reference_device(config.reference.device, config.device)
    policy = "cuda:0" if config.device == "auto" else config.device
    return policy, policy if config.reference.device == "auto" else config.reference.device


def _trainer(config: TrainConfig, shape: Shape, width: int, work: _Work, device: str) -> list[Need]:
    recompute, offload = config.gradient_checkpointing, config.optimizer.offload == "cpu"
    parts = memory.training(
        shape, width, config.optimizer, **work.forward(config.micro_batch_tokens), recompute=recompute
    )
    limit = f"computes {_si(_flops(config, shape) * work.step)}FLOP a step"
    host = memory.publication(shape, width) | (memory.offloaded(shape) if offload else {})
    if offload:
        limit += f", and AdamW moves {_si(28 * shape.trained)}B of main memory"
    return [
        Need("trainer", _place(device), parts, limit),
        Need("trainer", MAIN_MEMORY, {"published version": host.pop("weights"), **host}),
    ]


def _rank(config: TrainConfig, shape: Shape, width: int, work: _Work, device: str, *, ranks: int) -> list[Need]:
    if config.optimizer.offload != "none":
        raise UserError("optimizer.offload: under torchrun the ranks divide the optimizer's memory", "leave it out")
    if config.lora.load_in_4bit:
        raise UserError(
            "lora.load_in_4bit: under torchrun the ranks divide the weights' memory instead", "leave it out"
        )
    if not shape.layer:
        raise UserError("model: it has no layers that ranks could divide", "train it on one device, without torchrun")
    recompute, updates = config.gradient_checkpointing, config.num_iterations * config.minibatches
    micro_batches = work.micro_batches(config.micro_batch_tokens, ranks * config.minibatches)
    parts = {
        **memory.divided(shape, width, config.optimizer, ranks=ranks, micro_batches=micro_batches),
        "activations": memory.activations(shape, width, **work.forward(config.micro_batch_tokens), recompute=recompute),
    }
    flops = _flops(config, shape) * work.step / ranks
    moved = memory.traffic(shape, width, ranks=ranks, micro_batches=micro_batches) * updates
    if _scores_itself(config):
        moved += memory.gathered(shape, width, ranks=ranks, forwards=micro_batches * config.minibatches)
    limit = f"computes {_si(flops)}FLOP a step, sends and receives {_si(moved)}B"
    return [
        Need(f"trainer, each of {ranks} ranks", _place(device), parts, limit),
        Need("trainer, rank 0", MAIN_MEMORY, {"published version": memory.publication(shape, width)["weights"]}),
    ]


def _flops(config: TrainConfig, shape: Shape) -> int:
    """Of the trainer, for each token of a step. Two for each weight in a forward, two in a backward through it, and two
    for its own gradient (Kaplan et al., arXiv 2001.08361, 2.1)."""
    forward = 2 * shape.parameters
    update = forward * (2 if config.gradient_checkpointing else 1) + 2 * shape.parameters + 2 * shape.trained
    return config.num_iterations * update + _scores_itself(config) * forward


def _scores_itself(config: TrainConfig) -> bool:
    """Whether the trainer computes the reference's log-probs."""
    return config.loss.beta > 0 and not config.penalised_by_server


def _reference(
    config: TrainConfig, shape: Shape, teacher: PreTrainedModel | None, width: int, work: _Work, device: str
) -> list[Need]:
    """Its models score one after the other."""
    models = [*([shape] if config.penalised_by_server else []), *([_shape(teacher, config)] if teacher else [])]
    if not models:  # the server is only a queue, or has a teacher that only it knows
        return []
    place = _place(device) if config.server == INLINE else f"at {config.server}"
    each = [memory.scoring(model, width, **work.forward(_SCORING_TOKENS)) for model in models]
    parts = {"weights": sum(need["weights"] for need in each), "activations": max(need["activations"] for need in each)}
    flops = 2 * sum(model.parameters for model in models) * work.step
    return [Need("reference server", place, parts, f"computes {_si(flops)}FLOP a step")]


def _worker(
    config: TrainConfig, shape: Shape, width: int, work: _Work, device: str, gpu_bytes: int | None
) -> list[Need]:
    traits = config.sampler_traits
    if traits.server:
        return []
    place = _place(device) if config.rollout == "inline" else "each worker's device"
    rows = config.sampling.prompts_per_round * config.sampling.num_generations
    tokens = config.sampling.prompts_per_round * work.group
    parts = memory.sampling(shape, width, tokens=tokens, rows=rows)
    if traits.takes_first_gpus and (size := memory_size(_place(device), gpu_bytes)) is not None:
        # Asleep, its memory is the trainer's.
        asleep = config.vllm.enable_sleep_mode
        parts = {traits.engine: 0 if asleep else int(config.vllm.gpu_memory_utilization * size)}
    reads = _si(shape.weights(width)["weights"] * work.completion)
    return [Need("worker", place, parts, f"reads {reads}B of weights a round, for {rows} completions at once")]


def _place(device: str) -> str:
    return MAIN_MEMORY if device == "cpu" else device


def _si(number: float) -> str:
    """In three digits, with a prefix: 1.5 G."""
    power = int(math.log10(max(number, 1))) // 3
    return f"{number / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P', 'E', 'Z'][power]}"


GB = 10**9


@dataclass(frozen=True)
class Shortage:
    """A memory of `size` bytes that needs more. remedies: settings, the cheapest first."""

    memory: str
    needed: int
    size: int
    remedies: Sequence[str]

    @property
    def problem(self) -> str:
        return (
            f"{self.memory} has {self.size / GB:.1f} GB, and the run's processes there need about "
            f"{self.needed / GB:.1f} GB"
        )

    def __str__(self) -> str:
        return f"{self.problem}; what lowers that: {', '.join(self.remedies)}"


def shortages(config: TrainConfig, needs: Sequence[Need], gpu_bytes: int | None) -> list[Shortage]:
    """The memories that are too small: of this machine, or GPUs of `gpu_bytes` each."""
    short = []
    for place in dict.fromkeys(need.memory for need in needs):
        size = memory_size(place, gpu_bytes)
        needed = sum(need.total for need in needs if need.memory == place)
        if size is not None and needed > size:
            short.append(Shortage(place, needed, size, _remedies(config, needs, place)))
    return short


def _remedies(config: TrainConfig, needs: Sequence[Need], place: str) -> list[str]:
    here = {need.process for need in needs if need.memory == place}
    trains, gpu = any(process.startswith("trainer") for process in here), place != MAIN_MEMORY
    one_process = "trainer" in here
    several_groups = config.micro_batch_tokens > 1 and config.groups_per_step > 1
    may_quantise = config.lora.rank > 0 and not config.lora.load_in_4bit and config.sampler_traits.takes_4bit
    known = {
        spell_setting("gradient_checkpointing", True): gpu and trains and not config.gradient_checkpointing,
        f"a smaller {spell_setting('micro_batch_tokens')}": gpu and trains and several_groups,
        spell_setting("dtype", "bfloat16"): config.dtype != "bfloat16",
        spell_setting("reference.source", "adapter-off"): "reference server" in here and bool(config.lora.rank),
        spell_setting("optimizer.offload", "cpu"): gpu and one_process and config.optimizer.offload == "none",
        spell_setting("lora.rank", 16): trains and not config.lora.rank,
        spell_setting("lora.load_in_4bit", True): one_process and may_quantise,
        spell_setting("optimizer.offload", "none"): not gpu and config.optimizer.offload == "cpu",
        "more ranks under torchrun": gpu and trains,
        f"{spell_setting('reference.device')} of another GPU": gpu and trains and "reference server" in here,
        f"{spell_setting('rollout', 'external')} with workers elsewhere": trains and "worker" in here,
        f"a smaller {spell_setting('sampling.prompts_per_round')}": "worker" in here
        and not config.sampler_traits.takes_first_gpus,
    }
    return [remedy for remedy, helps in known.items() if helps] or ["a smaller model"]
