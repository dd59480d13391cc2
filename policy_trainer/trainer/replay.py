"""Trains from recorded batches: no server, no sampler, the same steps each time."""

import time
from collections.abc import Sequence
from contextlib import closing
from functools import cache, partial
from typing import Any

from rich.console import Console

from policy_trainer.algorithms.objective.group import Group
from policy_trainer.config import ReplayConfig
from policy_trainer.data.rendering import load_prompt_tokenizer
from policy_trainer.data.tasks.registry import make_task
from policy_trainer.learner.interface import PolicyLearner
from policy_trainer.processes.lifecycle.endings import RunFailed, StopRequest, write_failures
from policy_trainer.reporting.metrics import MetricsFile
from policy_trainer.rewards.registry import part_weights
from policy_trainer.run_files.recording import read_recording
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.parts import cpu_threads, step_record
from policy_trainer.trainer.policy import load_in_one_process
from policy_trainer.trainer.queue_client.terms import BatchCheck
from policy_trainer.trainer.run import TrainResult, count_steps
from shared.atomic_files import atomic_directory
from shared.batch import Batch
from shared.client import Leased
from shared.errors import UserError
from shared.models import use_threads
from shared.spelling import spell_setting


def replay(config: ReplayConfig, console: Console) -> TrainResult:
    """Trains until the recording or max_steps ends, or to a request to stop. RUN_DIR/model then has the weights.

    Raises UserError for settings or batches that cannot be used, RunFailed where no token trained or the disk is full.
    """
    use_threads(cpu_threads(config))  # those of the run: the same numbers, to the bit
    recorded = read_recording(config.batches, config.groups_per_step)
    task = cache(partial(make_task, config))
    counted = count_steps(config, task, console)
    directory = RunDirectory(config.run_dir)
    records: list[dict[str, Any]] = []
    with directory.hold():
        directory.refuse_trained(replay=True)
        directory.open(config, console, resume=False)
        tokenizer = load_prompt_tokenizer(config.model, config.data, revision=config.revision)
        # Only gdpo needs weights of rewards: without it the task's data need not be there.
        weights = part_weights(config, task()) if config.loss.advantage == "gdpo" else {}
        loaded = load_in_one_process(counted, config.model, config.revision, None, tokenizer, weights)
        check = BatchCheck.of(loaded.learner.model, counted, weights)
        with closing(MetricsFile(directory.metrics)) as metrics, StopRequest() as stop:
            for step, batches in recorded:
                if stop or step > counted.max_steps:
                    break
                records.append(_train(loaded.learner, check, step, batches))
                metrics.write(records[-1])
                console.print(_line(records[-1]), highlight=False)
        with write_failures(directory.model, "make room, and replay again"), atomic_directory(directory.model) as model:
            loaded.save(model)
    if not stop and not sum(record["tokens"] for record in records):
        raise RunFailed("the replay trained no token: no group had rewards that differ, or none could be judged")
    seconds = sum(record["training_seconds"] for record in records)
    groups = sum(len(record["batch_ids"]) for record in records)
    return TrainResult(not stop, records[-1]["step"] if records else 0, seconds, groups, None)


def _train(learner: PolicyLearner, check: BatchCheck, step: int, batches: Sequence[Batch]) -> dict[str, Any]:
    """The record of a step, as `train` writes it. step: its number, from 1.

    Raises UserError for a batch that these settings cannot train on.
    """
    for batch in batches:
        if reason := check.refusal(batch):
            raise UserError(
                f"batches: {batch.id} of step {step} cannot be trained on: {reason}",
                "give the settings and the model of the run that recorded it, or settings that need less "
                f"({spell_setting('loss.beta', 0)})",
            )
    began, groups = time.monotonic(), list[Group]()
    stats = learner.step(batches, step=step - 1, on_groups=groups.extend)
    seconds = time.monotonic() - began
    leased = [Leased(batch, batch.id, "", 1) for batch in batches]
    return {**step_record(leased, groups, stats, step), "training_seconds": seconds}


def _line(record: dict[str, Any]) -> str:
    line = f"step {record['step']}: loss {record['loss']:.4g}, reward {record['reward']:.4g}, grad_norm "
    return f"{line}{record['grad_norm']:.4g}{': not finite, so no update was made' if record['not_finite'] else ''}"
