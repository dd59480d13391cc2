"""Turns of processes on a device that has no room for all of them at once.

A process that wants the device locks one file, then another, then releases the first, so that the process that has
waited is next. The system releases the locks of a killed process, so that the others go on. The trainer takes
turns with its workers: a worker's engine loads and samples in its turns, and sleeps between them.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from policy_trainer.config import RolloutConfig, TrainConfig
from policy_trainer.rollout.sampling.engines import load_sampler, sampler_class
from policy_trainer.rollout.sampling.sampler import LoadedSampler, RunningBatch, Sampler, SamplingParams, Sleeper
from policy_trainer.run_files.locks import hold, is_held, let_go
from policy_trainer.run_files.run_directory import RunDirectory
from shared.batch import TokenGroup
from shared.client.retry import OnWait

_LOOK_SECONDS = 0.1


class DeviceTurns:
    """Keeps the device between blocks while no process waits for it. A thread releases it when one does."""

    def __init__(
        self,
        directory: Path,
        on_wait: OnWait,
        *,
        begin: Callable[[], None] = lambda: None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """directory: of the locks. on_wait: called while another process has the device; it may raise to give up.

        begin: called when the device was taken. end: called before it is released; it frees the memory.
        """
        self._next = directory / "next.lock"
        self._device = directory / "device.lock"
        self._on_wait = on_wait
        self.begin = begin
        self.end = end
        self._held: IO[bytes] | None = None
        self._busy = threading.Lock()
        self._failure: Exception | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="turns", daemon=True)
        self._thread.start()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Raises what on_wait, begin or the latest end has raised."""
        with self._busy:
            if self._failure:
                raise self._failure
            self._keep_or_take()
            yield

    def giving_way(self, on_wait: OnWait) -> OnWait:
        """`on_wait` for waits within a block: others may have the device meanwhile."""

        def wait(reason: str, seconds: float) -> None:
            on_wait(reason, seconds)
            self._keep_or_take()

        return wait

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        with self._busy:
            self._let_go()

    def _keep_or_take(self) -> None:
        if self._is_wanted():
            self._let_go()
        if self._held is None:
            self._take()

    def _is_wanted(self) -> bool:
        try:
            return self._held is not None and is_held(self._next)
        except FileNotFoundError:
            return True  # the run's directory was deleted, and the next one has other locks

    def _take(self) -> None:
        place = self._lock(self._next)
        try:
            device = self._lock(self._device)
        finally:
            let_go(place)
        try:
            self.begin()
        except BaseException:
            let_go(device)
            raise
        self._held = device

    def _lock(self, file: Path) -> IO[bytes]:
        return hold(file, "", seconds=math.inf, on_wait=lambda seconds: self._on_wait("its turn on the GPU", seconds))

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            try:
                self.end()
            finally:
                let_go(held)

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            if self._busy.acquire(blocking=False):
                try:
                    if self._is_wanted():
                        self._let_go()
                except Exception as error:
                    self._failure = error
                finally:
                    self._busy.release()


def in_turn(turns: DeviceTurns | None) -> AbstractContextManager[None]:
    """The block has the device for itself. None: the device has room for all. Blocks are not nested."""
    return nullcontext() if turns is None else turns.turn()


def choose_turns(config: TrainConfig, on_wait: OnWait) -> DeviceTurns | None:
    """The trainer's turns; None where the device has room for all. on_wait: called while a worker has the device; it
    may raise to give up."""
    if not config.vllm.enable_sleep_mode:
        return None
    sampler = sampler_class(config.sampler)
    assert issubclass(sampler, Sleeper)
    begin = partial(sampler.free_device, config)
    # What PyTorch keeps for the next step is memory that the engine needs.
    return DeviceTurns(RunDirectory(config.run_dir).turns, on_wait, begin=begin, end=torch.cuda.empty_cache)


class SamplerInTurns:
    """A sampler that takes the device for each call."""

    def __init__(self, sampler: Sampler, turns: DeviceTurns) -> None:
        self._sampler = sampler
        self._turns = turns

    def load(self, model: Path) -> None:
        with self._turns.turn():
            self._sampler.load(model)

    def logps(self, group: TokenGroup) -> np.ndarray:
        with self._turns.turn():
            return self._sampler.logps(group)

    @contextmanager
    def running_batch(self, params: SamplingParams, seed: int) -> Iterator[RunningBatch]:
        """Has the device for the whole block."""
        with self._turns.turn(), self._sampler.running_batch(params, seed) as batch:
            yield batch


def load_rollout_sampler(
    config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, on_wait: OnWait, on_turn: OnWait
) -> LoadedSampler:
    """`load_sampler` for the run's weights or adapters; with vllm.enable_sleep_mode it takes turns with the trainer.

    on_wait: called while the sampler waits for its server. on_turn: called while another process has the device.
    """
    if not config.vllm.enable_sleep_mode:
        return load_sampler(config, tokenizer, on_wait, lora=config.lora)
    turns = DeviceTurns(RunDirectory(config.run_dir).turns, on_turn)
    with turns.turn():
        sampler, model = load_sampler(config, tokenizer, turns.giving_way(on_wait), lora=config.lora)
        assert isinstance(sampler, Sleeper)
        turns.begin, turns.end = sampler.wake_up, sampler.sleep
    return SamplerInTurns(sampler, turns), model
