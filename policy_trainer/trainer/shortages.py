"""Which memories a plan does not fit into, and what to change."""

from collections.abc import Sequence
from dataclasses import dataclass

from policy_trainer.config import TrainConfig
from policy_trainer.trainer.machine import MAIN_MEMORY, memory_size
from policy_trainer.trainer.plan import Need

GB = 10**9


@dataclass(frozen=True)
class Shortage:
    """A memory of `size` bytes that needs more. remedies: settings, the cheapest first."""

    memory: str
    needed: int
    size: int
    remedies: Sequence[str]

    def __str__(self) -> str:
        return (
            f"{self.memory} has {self.size / GB:.1f} GB, and the run's processes there need about "
            f"{self.needed / GB:.1f} GB; what lowers that: {', '.join(self.remedies)}"
        )


def shortages(config: TrainConfig, needs: Sequence[Need], gpu_bytes: int | None) -> list[Shortage]:
    """The memories that are too small: of this machine, or GPUs of `gpu_bytes` each."""
    found = []
    for place in dict.fromkeys(need.memory for need in needs):
        size = memory_size(place, gpu_bytes)
        needed = sum(need.total for need in needs if need.memory == place)
        if size is not None and needed > size:
            found.append(Shortage(place, needed, size, _remedies(config, needs, place)))
    return found


def _remedies(config: TrainConfig, needs: Sequence[Need], place: str) -> list[str]:
    here = {need.process for need in needs if need.memory == place}
    trains, gpu = any(process.startswith("trainer") for process in here), place != MAIN_MEMORY
    alone = "trainer" in here
    several_groups = config.micro_batch_tokens > 1 and config.groups_per_step > 1
    known = {
        "--gradient-checkpointing": gpu and trains and not config.gradient_checkpointing,
        "a smaller --micro-batch-tokens": gpu and trains and several_groups,
        "--dtype bfloat16": config.dtype != "bfloat16",
        "--reference.source adapter-off": "reference server" in here and bool(config.lora.rank),
        "--optimizer.offload cpu": gpu and alone and config.optimizer.offload == "none",
        "--lora.rank 16": trains and not config.lora.rank,
        "--optimizer.offload none": not gpu and config.optimizer.offload == "cpu",
        "more ranks under torchrun": gpu and trains,
        "--reference.device of another GPU": gpu and trains and "reference server" in here,
        "--rollout external with workers elsewhere": trains and "worker" in here,
        "a smaller --sampling.prompts-per-round": "worker" in here and config.sampler == "hf",
    }
    return [remedy for remedy, helps in known.items() if helps] or ["a smaller model"]
