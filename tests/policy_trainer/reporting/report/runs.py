"""Directories of runs, written as runs write them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from policy_trainer.config import TrainConfig
from policy_trainer.reporting.metrics import MetricsFile
from policy_trainer.reporting.samples import SampledCompletion, SampledGroup, append_samples
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.evaluation.results import wilson_interval


def step_record(step: int, steps: int = 10) -> dict[str, Any]:
    """A step of a run that learns."""
    learned = step / steps
    return {
        "kind": "step", "step": step, "epoch": 0, "reward": 2 * learned, "reward/accuracy": learned,
        "reward/tags": learned, "reward_std": 0.5, "completions": 64, "completions_total": 64 * step,
        "runtime_seconds": 4.0 * step, "completion_length_mean": 20.5 - learned, "completion_length_min": 8,
        "completion_length_max": 40, "truncated": 0.1 - 0.1 * learned, "loss": 0.01, "kl": 0.125 * learned,
        "teacher_kl": None, "entropy": 1.5 - learned, "clip_ratio": 0.01, "clip_ratio_low": 0.01, "clip_ratio_high": 0,
        "staleness": 1.0, "staleness_max": 2, "frac_reward_zero_std": 0.25, "grad_norm": 0.9,
        "effective_sample_size": 0.99, "learning_rate": 3e-4, "training_seconds": 1.0, "waiting_seconds": 3.0,
        "waiting_share": 0.75, "sampling_seconds": 3.9, "judging_seconds": 0.4, "sampler_waiting_seconds": 0.1,
        "sampler_waiting_share": 0.025, "server_scoring_seconds": 0.5 * step, "batch_ids": ["a", "b"],
    }  # fmt: skip


def evaluation_record(step: int, right: int, of: int = 100) -> dict[str, Any]:
    low, high = wilson_interval(right, of)
    return {
        "kind": "evaluation", "step": step, "decoding": "greedy", "problems": of, "accuracy": right / of, "low": low,
        "high": high, "reward": 2 * right / of, "rewards": {"accuracy": right / of}, "finished": 1.0,
        "completions_total": 64 * step, "runtime_seconds": 4.0 * step,
    }  # fmt: skip


def completion(text: str, reward: float) -> SampledCompletion:
    return SampledCompletion(text, reward, {"accuracy": reward}, reward - 0.5, 7, finished=True)


def group(step: int, *completions: SampledCompletion, kind: str = "train", prompt: str = "6*7=?") -> SampledGroup:
    return SampledGroup(step, kind, None, "arithmetic", 7, prompt, "42", completions)


def make_run(
    root: Path, records: Sequence[dict[str, Any]] = (), groups: Sequence[SampledGroup] = (), **config: Any
) -> Path:
    """The directory of a run with this configuration, records and samples."""
    directory = RunDirectory(root)
    given = {"model": "base/model", "task": "arithmetic", "rewards": ["accuracy", "tags"], "max_steps": 10} | config
    directory.open(TrainConfig(run_dir=root, **given), Console(quiet=True), resume=False)
    metrics = MetricsFile(directory.metrics)
    for record in records:
        metrics.write(record)
    metrics.close()
    if groups:
        append_samples(directory.samples, groups)
    return root


def learning_run(root: Path, **config: Any) -> Path:
    """A run of ten steps, with an evaluation before and after, a warning, samples and a checkpoint's state."""
    records = [evaluation_record(0, 5), *(step_record(step) for step in range(1, 11)), evaluation_record(10, 90)]
    warning = {"kind": "health", "step": 9, "name": "kl", "seen": 2.5, "band": "below 1", "remedy": "raise loss.beta"}
    groups = [
        group(1, completion("forty", 0.0), completion("about 42", 0.25)),
        group(10, completion("41", math.nan), completion("42", 1.0)),
        group(0, completion("no idea", 0.0), kind="eval"),
        group(10, completion("the answer is 42", 1.0), kind="eval"),
    ]
    make_run(root, [*records, warning], groups, **config)
    saved = root / "checkpoints" / "step-00000010"
    saved.mkdir(parents=True)
    (saved / "trainer.json").write_text(json.dumps({"step": 10, "best_step": 10, "training_seconds": 40.0}))
    return root
