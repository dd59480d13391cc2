"""Trains a model on the rows of a file or dataset: its steps, held-out rows, checkpoints and metrics.

The rows and the learning rate of a step are functions of its number, so that a checkpoint of the weights is all that
resuming needs.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import OptimizerConfig
from policy_trainer.config.supervised import SupervisedConfig
from policy_trainer.data.tasks.problem_set import EVAL_EVERY, Shuffle
from policy_trainer.learner.gradient_checkpointing import checkpoint_layers
from policy_trainer.learner.optimizer import Weights, clip_gradients, lr_factor, step_weights
from policy_trainer.processes.lifecycle.endings import RunFailed, StopRequest, write_failures
from policy_trainer.reporting.metrics import Metrics, MetricsFile, truncate_metrics
from policy_trainer.run_files.checkpoint import Checkpoints, TrainState, read_state, restore
from policy_trainer.run_files.run_directory import RunDirectory
from shared.atomic_files import atomic_directory
from shared.errors import UserError
from shared.models import load_tokenizer, save_model, use_threads
from shared.spelling import spell_setting

# How often a run without a terminal, which has no bar, says how far it is.
_LINE_SECONDS = 30.0

Row = TypeVar("Row")
Row_contra = TypeVar("Row_contra", contravariant=True)


class RowSet(Generic[Row]):
    """Training rows in batches, shuffled in each epoch by a pure function of the seed; and held-out rows."""

    def __init__(
        self, rows: Sequence[Row], eval_rows: Sequence[Row], *, epochs: int, batch_size: int, seed: int
    ) -> None:
        self.rows = rows
        self.eval_rows = eval_rows
        self._total = epochs * len(rows)
        self._batch_size = batch_size
        self._shuffle = Shuffle(len(rows), seed)

    @property
    def steps(self) -> int:
        """Steps of all epochs. The last step may have fewer rows than the others."""
        return -(-self._total // self._batch_size)

    def batch(self, step: int) -> list[Row]:
        """The rows of a step, counted from 0."""
        start = step * self._batch_size
        places = range(start, min(start + self._batch_size, self._total))
        return [self.rows[self._shuffle.place(place)] for place in places]


def every_tenth(
    rows: Sequence[Row], key: Callable[[Row], str], source: str, note: Callable[[str], None]
) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and every tenth row, held out. No key is in both.

    source: the setting to name, and its value. note: called with the number of rows that are in neither.

    Raises UserError where nothing is left to train on.
    """
    held_back = rows[::EVAL_EVERY]
    held_out = {key(row) for row in held_back}
    train = [row for row in rows if key(row) not in held_out]
    if not train:
        raise UserError(
            f"{source} leaves nothing to train on: one of every {EVAL_EVERY} rows, and each copy of it, is held out",
            f"add some, or name held-out ones with {spell_setting('data.eval_path')}",
        )
    if copies := len(rows) - len(train) - len(held_back):
        note(
            f"{source} has {len(rows)} rows: {copies} of them are left out, because they share a prompt with a "
            f"held-out row (every {EVAL_EVERY}th is held out); to train on all, name others with "
            f"{spell_setting('data.eval_path')}"
        )
    return train, list(held_back)


def update(weights: Weights, optimizer: OptimizerConfig, shares: Iterable[Tensor], lr: float) -> Metrics:
    """Makes one optimizer step. shares: what each micro-batch adds to the loss; computed one after the other.

    Returns loss: before the update. grad_norm: before clipping. not_finite: one of them was not finite, and nothing was
    updated. And the learning_rate.
    """
    weights.optimizer.zero_grad(set_to_none=True)
    losses = []
    for share in shares:
        share.backward()
        losses.append(share.detach())
    loss = float(torch.stack(losses).sum())
    norm = clip_gradients(weights, optimizer)
    not_finite = not (math.isfinite(loss) and math.isfinite(norm))
    if not not_finite:
        step_weights(weights, optimizer, lr)
    return {"loss": loss, "grad_norm": norm, "learning_rate": lr, "not_finite": not_finite}


class RowLearner(Protocol[Row_contra]):
    """A model that trains on rows. What it measures is written to metrics.jsonl."""

    model: PreTrainedModel
    weights: Weights

    def step(self, rows: Sequence[Row_contra], *, lr: float) -> Metrics:
        """Makes one update by `update`; returns its numbers and others."""
        ...

    def evaluate(self, rows: Sequence[Row_contra]) -> Metrics:
        """Measures without training: eval_loss and other numbers."""
        ...

    def describe(self, evaluation: Metrics) -> str: ...


@dataclass(frozen=True)
class SupervisedResult:
    """How a run ended. evaluation: the last one. seconds: of training, in all processes."""

    finished: bool
    steps: int
    evaluation: Metrics
    seconds: float


def train_on_rows(
    config: SupervisedConfig,
    console: Console,
    *,
    model: Callable[[str, str | None], PreTrainedModel],
    data: Callable[[PreTrainedModel, PreTrainedTokenizerBase, Callable[[str], None]], RowSet[Any]],
    learner: Callable[[PreTrainedModel, PreTrainedTokenizerBase], RowLearner[Any]],
) -> SupervisedResult:
    """Trains until the last step or a request to stop. RUN_DIR/model or a checkpoint then has the weights.

    model: loads a path or hub id, of this revision. data: loads the rows, and calls the given function with a line
    about them. learner: makes the learner of the model.

    Raises UserError for a configuration or data that cannot be used, RunFailed for a loss that is not finite,
    and for a disk that is full.
    """
    use_threads(config.threads)
    directory = RunDirectory(config.run_dir)
    with directory.hold():
        resumed = directory.open(config, console, resume=config.resume)
        checkpoints = Checkpoints(directory.checkpoints, keep=config.checkpoint.save_total_limit)
        checkpoint = checkpoints.newest() if resumed else None
        state = read_state(checkpoint) if checkpoint else TrainState()
        # Without a checkpoint step 0 is evaluated again, and its record is dropped too.
        truncate_metrics(directory.metrics, state.step if checkpoint else -1)
        source, revision = (str(checkpoint), None) if checkpoint else (config.model, config.revision)
        loaded, tokenizer = model(source, revision), load_tokenizer(source, revision=revision)
        rows = data(loaded, tokenizer, partial(console.print, highlight=False, soft_wrap=True))
        if config.gradient_checkpointing:
            checkpoint_layers(loaded)
        made = learner(loaded, tokenizer)
        if checkpoint:
            restore(checkpoint, made.weights)
        with closing(MetricsFile(directory.metrics)) as metrics, StopRequest() as stop, _bar(console) as bar:
            run = SupervisedRun(config, directory, state, rows, made, tokenizer, checkpoints, metrics, bar)
            return run.run(stop)


@dataclass
class SupervisedRun:
    """A run from its state at the start of this process to its end."""

    config: SupervisedConfig
    directory: RunDirectory
    state: TrainState
    data: RowSet[Any]
    learner: RowLearner[Any]
    tokenizer: PreTrainedTokenizerBase
    checkpoints: Checkpoints
    metrics: MetricsFile
    bar: Progress
    evaluation: Metrics = field(default_factory=dict)

    def run(self, stop: StopRequest) -> SupervisedResult:
        """Trains the remaining steps and saves the model, or saves a checkpoint when it is stopped."""
        state, steps = self.state, self.data.steps
        task = self.bar.add_task("", total=steps, completed=state.step)
        if state.step == 0:
            self._evaluate()
        first, started = state.step, time.monotonic()
        printed = started
        while state.step < steps and not stop:
            began = time.monotonic()
            loss = self._step()
            state.training_seconds += time.monotonic() - began
            self.bar.update(task, completed=state.step)
            now = time.monotonic()
            if self.bar.disable and state.step < steps and now - printed >= _LINE_SECONDS:
                printed, left = now, (now - started) / (state.step - first) * (steps - state.step)
                self._print(f"step {state.step}/{steps} · loss {loss:.4f} · about {left:.0f} s left")
            # Before the checkpoint, so that weights without a finite loss are not saved.
            if state.step == steps or (self.config.eval_steps and state.step % self.config.eval_steps == 0):
                self._evaluate()
            if state.step % self.config.checkpoint.save_steps == 0:
                self._checkpoint()
        finished = state.step >= steps
        if finished:
            self._save_model()
        elif state.step:
            self._checkpoint()
        return SupervisedResult(finished, state.step, self.evaluation, state.training_seconds)

    def _step(self) -> float:
        """Returns the loss."""
        lr = self.config.optimizer.learning_rate * lr_factor(self.state.step, self.config.optimizer, self.data.steps)
        stats = self.learner.step(self.data.batch(self.state.step), lr=lr)
        if stats["not_finite"]:
            raise _not_finite(f"loss or gradient of step {self.state.step + 1}")
        self.state.step += 1
        self.metrics.write({"kind": "step", "step": self.state.step, **stats})
        self.bar.update(self.bar.task_ids[0], description=f"loss {stats['loss']:.4f}")
        return stats["loss"]

    def _evaluate(self) -> None:
        self.evaluation = result = self.learner.evaluate(self.data.eval_rows)
        self.metrics.write({"kind": "evaluation", "step": self.state.step, **result})
        if not math.isfinite(result["eval_loss"]):  # no later step would show that the last update broke the weights
            raise _not_finite(f"held-out loss after step {self.state.step}")
        self._print(f"step {self.state.step}/{self.data.steps} · {self.learner.describe(result)}")

    def _print(self, line: str) -> None:
        self.bar.console.print(line, highlight=False, soft_wrap=True)

    def _checkpoint(self) -> None:
        with write_failures(f"the checkpoint of step {self.state.step}"):
            self.checkpoints.save(self.state, self.learner.model, self.tokenizer, self.learner.weights)

    def _save_model(self) -> None:
        with write_failures(self.directory.model), atomic_directory(self.directory.model) as temporary:
            save_model(self.learner.model, self.tokenizer, temporary)


def _not_finite(what: str) -> RunFailed:
    return RunFailed(
        f"the {what} is not finite",
        f"lower optimizer.learning_rate, or set dtype = float32; {spell_setting('resume', True)} continues from the "
        "newest checkpoint",
    )


def _bar(console: Console) -> Progress:
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TextColumn("{task.description}"))
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
