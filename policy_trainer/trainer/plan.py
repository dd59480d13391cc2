"""What the processes of a run need in memory, what limits their speed, and what does not fit; nothing is loaded."""

import copy
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from policy_trainer.config import INLINE, TrainConfig
from policy_trainer.data.problem import Task, training_problems
from policy_trainer.data.prompts import PromptEncoder, UnusablePrompt, prompt_limit
from policy_trainer.learner.adapters import adapt
from policy_trainer.trainer import memory
from policy_trainer.trainer.memory import Parts, Shape, Work
from policy_trainer.trainer.reference_servers import reference_device
from shared.devices import choose_device
from shared.errors import UserError
from shared.logprobs import may_pack
from shared.logprobs.padded import ROW_TOKENS
from shared.models import load_outline
from shared.process import KEPT_MEMORY
from shared.spelling import spell_setting

MAIN_MEMORY = "main memory"
GB = 10**9


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


@dataclass(frozen=True)
class Shortage:
    """A memory of `size` bytes that needs more. remedies: settings, what helps most first."""

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


class Planner:
    """Plans runs of one model, with any settings."""

    def __init__(
        self,
        outline: PreTrainedModel,
        gpu_bytes: int | None,
        *,
        ranks: int = 1,
        teacher: PreTrainedModel | None = None,
        prompt: int | None = None,
    ) -> None:
        """outline: the model's shapes. gpu_bytes: memory of each GPU; None for the devices of this machine. ranks: that
        torchrun divides the policy among. teacher: the shapes of the teacher that the run's own server has. prompt:
        tokens of the longest prompt; None for as many as a prompt may have."""
        self._outline = outline
        self._gpu_bytes = gpu_bytes
        self._ranks = ranks
        self._teacher = teacher
        self._prompt = prompt
        self._known_shapes: dict[tuple[str, bool], tuple[Shape, Shape]] = {}

    def needs(self, config: TrainConfig) -> list[Need]:
        """What the processes of a run need.

        Raises UserError for a device that this machine lacks, if gpu_bytes is None, and for what ranks cannot do;
        Unplanned for a model whose sizes cannot be read.
        """
        device, reference = _devices(config, self._gpu_bytes)
        step = _Step.of(config, self._outline, self._prompt)
        shape, trained = self._shapes(config)
        width = _WIDTHS.get(config.dtype, self._outline.dtype.itemsize)
        trainer = _trainer if self._ranks == 1 else partial(_rank, ranks=self._ranks)
        return [
            *trainer(config, trained, width, step, device),
            *_reference(config, shape, self._teacher, width, step, reference),
            *_worker(config, shape, trained, width, step, device, self._gpu_bytes),
        ]

    def _shapes(self, config: TrainConfig) -> tuple[Shape, Shape]:
        """Of the model, and of the policy, which may train only a part of it or have adapters."""
        key = config.lora.model_dump_json(), config.freezes_vision_tower
        if key not in self._known_shapes:
            policy = copy.deepcopy(self._outline)
            adapt(policy, config)
            self._known_shapes[key] = _shape(self._outline, config), _shape(policy, config)
        return self._known_shapes[key]

    def shortages(self, config: TrainConfig, *, at_least: bool = False) -> list[Shortage]:
        """The memories that are too small. at_least: even if completions are short."""
        needs, short = self.needs(config), []
        if at_least:
            needs = [need.at_least for need in needs]
        for place in dict.fromkeys(need.memory for need in needs):
            size, needed = memory_size(place, self._gpu_bytes), _needed(needs, place)
            if size is not None and needed > size:
                short.append(Shortage(place, needed, size, self._remedies(config, needs, place, size)))
        return short

    def _remedies(self, config: TrainConfig, needs: Sequence[Need], place: str, size: int) -> list[str]:
        """Settings with what the memory needs then, the least first, and what no setting of this run changes."""

        def needed(name: str, value: Any) -> int:
            return _needed(self.needs(_changed(config, name, value)), place)

        halved = {tokens: needed("micro_batch_tokens", tokens) for tokens in _halves(config.micro_batch_tokens)}
        enough = max(size, min(halved.values()))
        settings = [
            ("gradient_checkpointing", True),
            ("micro_batch_tokens", max(tokens for tokens, bytes_ in halved.items() if bytes_ <= enough)),
            ("dtype", "bfloat16"),
            ("optimizer.offload", "none" if place == MAIN_MEMORY else "cpu"),
            ("lora.rank", config.lora.rank or 16),
            *([("reference.source", "adapter-off")] if config.lora.rank else []),
            *([("lora.load_in_4bit", True)] if config.lora.rank and config.sampler_traits.takes_4bit else []),
            ("sampling.prompts_per_round", max(1, config.sampling.prompts_per_round // 2)),
        ]
        before, after = _needed(needs, place), dict[str, int]()
        for name, value in settings:
            with suppress(UserError):  # what ranks cannot do
                after[spell_setting(name, value)] = needed(name, value)
        helpful = sorted((bytes_, setting) for setting, bytes_ in after.items() if bytes_ < before)
        here = {need.process for need in needs if need.memory == place}
        trains, gpu = any(process.startswith("trainer") for process in here), place != MAIN_MEMORY
        others = {
            "more ranks under torchrun": gpu and trains,
            f"{spell_setting('reference.device')} of another GPU": gpu and trains and "reference server" in here,
            f"{spell_setting('rollout', 'external')} with workers elsewhere": trains and "worker" in here,
        }
        return [
            *(f"{setting} (then about {bytes_ / GB:.1f} GB)" for bytes_, setting in helpful),
            *(remedy for remedy, helps in others.items() if helps),
        ] or ["a smaller model"]


def _shape(model: PreTrainedModel, config: TrainConfig) -> Shape:
    try:
        bonus = config.loss.entropy.coef > 0 or config.loss.entropy.target is not None
        return Shape.of(model, in_4bit=config.lora.load_in_4bit, entropy_bonus=bonus)
    except Exception as error:  # an architecture may name its sizes in any way
        raise Unplanned(f"model: its memory needs are unknown: {type(error).__name__}: {error}") from error


def load_teacher_outline(config: TrainConfig) -> PreTrainedModel | None:
    """The shapes of the teacher of the trainer's own server, if it has one. Raises UserError."""
    if config.teacher is None or config.server != INLINE:
        return None
    return load_outline(config.teacher, revision=None)


@dataclass(frozen=True)
class _Step:
    """The tokens of a step if every completion is as long as it may be. rows: completions of a group. packed: whether
    they share their prompt in a forward."""

    groups: int
    rows: int
    prompt: int
    completion: int
    packed: bool

    @classmethod
    def of(cls, config: TrainConfig, outline: PreTrainedModel, prompt: int | None) -> "_Step":
        longest = prompt_limit(outline, config)
        return cls(
            groups=config.groups_per_step,
            rows=config.sampling.num_generations,
            prompt=longest if prompt is None else min(prompt, longest),
            completion=config.sampling.max_completion_length,
            packed=may_pack(outline),
        )

    @property
    def group(self) -> int:
        return self.prompt + self.rows * self.completion

    @property
    def tokens(self) -> int:
        return self.groups * self.group

    def micro_batches(self, budget: int, parts: int) -> int:
        """Of one of so many equal parts of a step."""
        groups = -(-self.tokens // (self.group * parts))
        return -(-groups // max(1, budget // self.group))

    def forward(self, budget: int, device: str) -> Work:
        """The largest forward: whole groups up to a budget of tokens, or one that is larger."""
        groups = max(1, min(budget, self.tokens) // self.group)
        tokens = self.group if self.packed else self.rows * (self.prompt + self.completion)
        return Work(
            tokens=groups * tokens, completions=groups * self.rows * self.completion, device=device.partition(":")[0]
        )

    def scoring(self, device: str) -> Work:
        """The largest forward of the server, which may have more groups waiting than a step has. Its padded forwards
        let go of each micro-batch of rows."""
        work = replace(self, groups=_SCORING_TOKENS).forward(_SCORING_TOKENS, device)
        most = work.tokens if self.packed else max(ROW_TOKENS, self.prompt + self.completion)
        return replace(work, tokens=min(work.tokens, most))


def _devices(config: TrainConfig, gpu_bytes: int | None) -> tuple[str, str]:
    """Of the policy, and of the reference."""
    if gpu_bytes is None:
        policy = str(choose_device(config.device))
        # Not checked: the server, which starts there, refuses a device that does not exist.
        return policy, reference_device(config.reference.device, config.device)
    policy = "cuda:0" if config.device == "auto" else config.device
    return policy, policy if config.reference.device == "auto" else config.reference.device


def _trainer(config: TrainConfig, shape: Shape, width: int, step: _Step, device: str) -> list[Need]:
    recompute, offload = config.gradient_checkpointing, config.optimizer.offload == "cpu"
    parts = memory.training(
        shape, width, config.optimizer, step.forward(config.micro_batch_tokens, device), recompute=recompute
    )
    limit = f"computes {_si(_flops(config, shape) * step.tokens)}FLOP a step"
    host = memory.publication(shape, width) | (memory.offloaded(shape) if offload else {})
    if offload:
        limit += f", and AdamW moves {_si(28 * shape.trained)}B of main memory"
    return [_need("trainer", _place(device), parts, limit), Need("trainer", MAIN_MEMORY, host)]


def _rank(config: TrainConfig, shape: Shape, width: int, step: _Step, device: str, *, ranks: int) -> list[Need]:
    if config.optimizer.offload != "none":
        raise UserError("optimizer.offload: under torchrun the ranks divide the optimizer's memory", "leave it out")
    if config.lora.load_in_4bit:
        raise UserError(
            "lora.load_in_4bit: under torchrun the ranks divide the weights' memory instead", "leave it out"
        )
    if not shape.layer:
        raise UserError("model: it has no layers that ranks could divide", "train it on one device, without torchrun")
    recompute, updates = config.gradient_checkpointing, config.num_iterations * config.minibatches
    micro_batches = step.micro_batches(config.micro_batch_tokens, ranks * config.minibatches)
    parts = {
        **memory.divided(shape, width, config.optimizer, ranks=ranks, micro_batches=micro_batches),
        "activations": memory.activations(
            shape, width, step.forward(config.micro_batch_tokens, device), recompute=recompute
        ),
    }
    flops = _flops(config, shape) * step.tokens / ranks
    moved = memory.traffic(shape, width, ranks=ranks, micro_batches=micro_batches) * updates
    if _scores_itself(config):
        moved += memory.gathered(shape, width, ranks=ranks, forwards=micro_batches * config.minibatches)
    limit = f"computes {_si(flops)}FLOP a step, sends and receives {_si(moved)}B"
    return [
        _need(f"trainer, each of {ranks} ranks", _place(device), parts, limit),
        Need("trainer, rank 0", MAIN_MEMORY, memory.publication(shape, width)),
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
    config: TrainConfig, shape: Shape, teacher: PreTrainedModel | None, width: int, step: _Step, device: str
) -> list[Need]:
    """Its models score one after the other."""
    models = [*([shape] if config.serves_first_policy else []), *([_shape(teacher, config)] if teacher else [])]
    if not models:  # the server is only a queue, or has a teacher that only it knows
        return []
    place = _place(device) if config.server == INLINE else f"at {config.server}"
    each = [memory.scoring(model, width, step.scoring(device)) for model in models]
    parts = {"weights": sum(need["weights"] for need in each), "activations": max(need["activations"] for need in each)}
    flops = 2 * sum(model.parameters for model in models) * step.tokens
    return [_need("reference server", place, parts, f"computes {_si(flops)}FLOP a step")]


def _worker(
    config: TrainConfig, shape: Shape, trained: Shape, width: int, step: _Step, device: str, gpu_bytes: int | None
) -> list[Need]:
    traits = config.sampler_traits
    if traits.server:
        return []
    place = _place(device) if config.rollout == "inline" else "each worker's device"
    rows = config.sampling.prompts_per_round * config.sampling.num_generations
    tokens = config.sampling.prompts_per_round * step.group
    parts = memory.sampling(shape, width, tokens=tokens, rows=rows)
    if place == MAIN_MEMORY:  # a GPU's worker reads it tensor by tensor
        parts |= memory.publication(trained, width)
        if traits.can_fork and not config.lora.load_in_4bit:
            parts |= memory.prepacked(shape, width)
    if traits.takes_first_gpus and (size := memory_size(_place(device), gpu_bytes)) is not None:
        # Asleep, its memory is the trainer's.
        asleep = config.vllm.enable_sleep_mode
        parts = {traits.engine: 0 if asleep else int(config.vllm.gpu_memory_utilization * size)}
    reads = _si(shape.weights(width)["weights"] * step.completion)
    return [_need("worker", place, parts, f"reads {reads}B of weights a round, for {rows} completions at once")]


def _need(process: str, place: str, parts: Parts, limit: str) -> Need:
    """What a process needs on its device: on a CPU also what it holds before it loads a model, and what it has freed
    and keeps."""
    if place == MAIN_MEMORY:
        kept = min(parts.get("activations", 0), KEPT_MEMORY)
        parts = memory.PROGRAM | parts | ({"freed memory": kept} if kept else {})
    return Need(process, place, parts, limit)


def _place(device: str) -> str:
    return MAIN_MEMORY if device == "cpu" else device


def _si(number: float) -> str:
    """In three digits, with a prefix: 1.5 G."""
    power = int(math.log10(max(number, 1))) // 3
    return f"{number / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P', 'E', 'Z'][power]}"


def _needed(needs: Sequence[Need], place: str) -> int:
    return sum(need.total for need in needs if need.memory == place)


def _changed(config: TrainConfig, name: str, value: Any) -> TrainConfig:
    section, _, field = name.rpartition(".")
    changed = {section: getattr(config, section).model_copy(update={field: value})} if section else {field: value}
    return config.model_copy(update=changed)


def _halves(number: int) -> list[int]:
    """The number, halved again and again."""
    return [number >> places for places in range(1, number.bit_length())] or [1]


# Prompts whose length is measured.
_MEASURED = 200


def prompt_lengths(encoder: PromptEncoder, task: Task) -> tuple[list[int], list[str]]:
    """Tokens of the first prompts that are usable, and the errors of those that are not."""
    lengths, unusable = list[int](), list[str]()
    for index in range(min(_MEASURED, training_problems(task) or _MEASURED)):
        try:
            lengths.append(len(encoder.encode(task.problem(index))))
        except UnusablePrompt as error:
            unusable.append(str(error))
    return lengths, unusable
