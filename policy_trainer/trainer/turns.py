"""When the trainer may use its GPU: always, or in turns with the workers."""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from policy_trainer.config import SamplerName, TrainConfig
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.turns import DeviceTurns, NoTurns, Turns
from policy_trainer.sampling.engines import server_url
from policy_trainer.sampling.vllm_server import put_to_sleep
from shared.client.connection import OnWait


def _nothing(config: TrainConfig) -> None:
    """The engine is its worker: it sleeps, or ended with it."""


def _server_sleeps(config: TrainConfig) -> None:
    """It was started a moment ago, or its worker was killed."""
    put_to_sleep(server_url(config))


_BEGINNINGS: Mapping[SamplerName, Callable[[TrainConfig], None]] = {
    "vllm": _nothing,
    "vllm-server": _server_sleeps,
}


def choose_turns(config: TrainConfig, on_wait: OnWait) -> Turns:
    """on_wait: called while a worker has the device; it may raise to give up."""
    if not config.vllm.enable_sleep_mode:
        return NoTurns()
    begin = partial(_BEGINNINGS[config.sampler], config)
    # What PyTorch keeps for the next step is memory that the engine needs.
    return DeviceTurns(RunDirectory(config.run_dir).turns, on_wait, begin=begin, end=torch.cuda.empty_cache)
