"""A worker whose engine shares the trainer's GPU: it loads and samples in its turns, and sleeps between them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from policy_trainer.config import RolloutConfig
from policy_trainer.data.completion import Completion
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.turns import DeviceTurns, Turns
from policy_trainer.sampling.engines import LoadedSampler, load_sampler
from policy_trainer.sampling.sampler import Sampler, SamplingParams, Sleeper
from shared.batch import TokenGroup
from shared.client.connection import OnWait


class SamplerInTurns:
    """A sampler whose every call has the device."""

    def __init__(self, sampler: Sampler, turns: Turns) -> None:
        self._sampler = sampler
        self._turns = turns

    def load(self, model: Path) -> None:
        with self._turns.turn():
            self._sampler.load(model)

    def logps(self, group: TokenGroup) -> np.ndarray:
        with self._turns.turn():
            return self._sampler.logps(group)

    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int) -> list[list[Completion]]:
        with self._turns.turn():
            return self._sampler.sample(prompts, params, seed)


def load_at_once(config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, on_wait: OnWait) -> LoadedSampler:
    """`load_sampler` for the run's weights or adapters."""
    return load_sampler(config, tokenizer, on_wait, lora_rank=config.lora.rank)


def load_in_turns(config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, on_wait: OnWait) -> LoadedSampler:
    """As `load_at_once`. on_wait is also called while another process has the device."""
    turns = DeviceTurns(RunDirectory(config.run_dir).turns, on_wait)
    with turns.turn():
        loaded = load_sampler(config, tokenizer, turns.give_way, lora_rank=config.lora.rank)
        assert isinstance(loaded.sampler, Sleeper)
        turns.begin, turns.end = loaded.sampler.wake_up, loaded.sampler.sleep
    return LoadedSampler(SamplerInTurns(loaded.sampler, turns), loaded.model)


# By vllm.enable_sleep_mode.
LOADERS: Mapping[bool, Callable[[RolloutConfig, PreTrainedTokenizerBase, OnWait], LoadedSampler]] = {
    False: load_at_once,
    True: load_in_turns,
}
