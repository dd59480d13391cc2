"""`train --dry-run`: one group goes through all that a run does, in a temporary directory; a table tells how.

It is `train` itself with one step of one group: what a real run would fail on at its start fails here.
"""

import resource
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from policy_trainer.config import INLINE, TrainConfig
from policy_trainer.lifecycle.timing import Stopwatch
from policy_trainer.ranks.world import World
from policy_trainer.reporting.metrics import read_metrics
from policy_trainer.reporting.sample_views import by_reward, view
from policy_trainer.reporting.samples import SampledGroup, read_samples
from policy_trainer.reporting.tracking import refuse_missing
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.run import TrainResult, train
from shared.devices import choose_device
from shared.errors import UserError

_EVAL_PROBLEMS = 2
# Characters of a text that are shown.
_SHOWN = 400
_GIB = 2**30
# The rows of the table: stages of the trainer, then of the others.
STAGES = {
    "load model": "load the policy, its data and rewards",
    "server": "wait for the reference server (it loads at the same time)",
    "worker": "start a rollout worker, upload",
    "sample": "sample a group",
    "judge": "judge it",
    "score": "score it with the reference",
    "learn": "learn from it",
    "publish": "publish weights for the workers",
    "evaluate": "evaluate a few held-out problems, twice",
    "checkpoint": "write a checkpoint",
    "save model": "write the trained model",
}


def dry_run(config: TrainConfig, console: Console, world: World | None = None) -> TrainResult:
    """Raises what `train` raises. Leaves nothing behind: run_dir is neither read nor written."""
    refuse_missing(config.report_to)
    stopwatch = Stopwatch()
    with temporary_run(config.run_dir, "dry-run-") as run_dir:
        trial = one_group(config, run_dir)
        result = train(trial, console, stopwatch, world)
        if result.finished:
            _show(config, stopwatch.seconds, *what_happened(run_dir), console)
    return result


def one_group(config: TrainConfig, run_dir: Path) -> TrainConfig:
    """The run's settings, for one step of one group. Its group trains even if its rewards are all equal."""
    own = config.server == INLINE
    changed = {
        "sampling": {"prompts_per_round": 1, "max_resamples": 0, "regroup": 0},
        "loss": {"drop_zero_variance": False},
        "evaluation": {"problems": _EVAL_PROBLEMS, "eval_steps": 0},
        "checkpoint": {"save_steps": 1},
        "samples": {"every": 1, "prompts": 1},
        # Another's server keeps its reference.
        "reference": {} if own else {"sync_steps": 0},
    }
    return config.model_copy(
        update={
            "run_dir": run_dir,
            "run": run_dir.name,
            "resume": False,
            "dry_run": True,
            "rollout": "inline",
            "max_steps": 1,
            "num_train_epochs": None,
            "groups_per_step": 1,
            "max_waiting": 1,
            "minibatches": 1,
            "publish_every": 1,
            "record": None,
            "report_to": [],
            "show_samples": False,
            **{name: getattr(config, name).model_copy(update=values) for name, values in changed.items()},
        }
    )


def what_happened(run_dir: Path) -> tuple[Mapping[str, Any], SampledGroup]:
    """The step's record of metrics.jsonl and its group, once the trial in this directory has finished."""
    directory = RunDirectory(run_dir)
    step = next(record for record in read_metrics(directory.metrics) if record["kind"] == "step")
    return step, next(group for group in read_samples(directory.samples) if group.kind == "train")


@contextmanager
def temporary_run(run_dir: Path, prefix: str) -> Iterator[Path]:
    """A directory on the disk that the run will use. Raises UserError if nothing can be written there."""
    above = next(path for path in run_dir.absolute().parents if path.is_dir())
    try:
        temporary = tempfile.TemporaryDirectory(prefix=prefix, dir=above)
    except OSError as error:
        raise UserError(f"run_dir: {above} cannot be written: {error.strerror}; choose another --run-dir") from None
    with temporary as name:
        yield Path(name)


def _show(
    config: TrainConfig, clocked: Mapping[str, float], step: Mapping[str, Any], group: SampledGroup, console: Console
) -> None:
    seconds = {**clocked, **_seconds_of_others(config, step)}
    table = Table("stage", "seconds", title="dry run: one group has gone through everything")
    for stage, label in STAGES.items():
        if stage in seconds:
            table.add_row(label, f"{seconds[stage]:.1f}")
    console.print(table)
    best = by_reward(group.completions)[-1:]
    console.print(view(replace(group, completions=tuple(best)), most=_SHOWN))
    completions, longest = config.sampling.num_generations, config.sampling.max_completion_length
    sampled = sum(item.tokens for item in group.completions)
    console.print(
        f"peak memory of the trainer: {peak_gib(config.device):.2f} GiB, for a group of {sampled} completion tokens; "
        f"the longest group has {completions} x {longest} = {completions * longest}, and a step's groups are joined up "
        f"to micro_batch_tokens = {config.micro_batch_tokens}",
        highlight=False,
    )
    console.print(f"the dry run went well; {config.run_dir} was not touched", highlight=False)


def _seconds_of_others(config: TrainConfig, step: Mapping[str, Any]) -> dict[str, float]:
    """Of the worker and the server, as the step's metrics tell them."""
    judging = step["judging_seconds"]
    # A server that others use, too, does not tell what this group took it.
    inline = config.server == INLINE and config.scored_by_server
    scoring = {"score": step["server_scoring_seconds"] or 0.0} if inline else {}
    worked = step["sampling_seconds"] + sum(scoring.values())
    waited = max(0.0, step["waiting_seconds"] - worked)
    return {"worker": waited, "sample": step["sampling_seconds"] - judging, "judge": judging, **scoring}


def peak_gib(device: str) -> float:
    """Of the GPU, or of the process's main memory where there is none."""
    where = choose_device(device)
    if where.type == "cuda":
        return torch.cuda.max_memory_allocated(where) / _GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB  # in KiB on Linux
