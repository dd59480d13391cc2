"""Supervised fine-tuning: trains a model on the completions of a file, before GRPO.

The rows and the learning rate of a step are functions of its number, so that a checkpoint of the weights is all that
resuming needs.
"""

import math
import shutil
import time
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import SftConfig
from policy_trainer.learner.gradient_checkpointing import checkpoint_layers
from policy_trainer.learner.optimizer import lr_factor
from policy_trainer.lifecycle.endings import RunFailed, StopRequest
from policy_trainer.reporting.metrics import MetricsFile, truncate_metrics
from policy_trainer.run_files.checkpoint import Checkpoints, TrainState, read_state, restore
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.write_failures import write_failures
from policy_trainer.sft.demonstration_set import DemonstrationSet, load_demonstrations
from policy_trainer.sft.supervision import SupervisedLearner, SupervisedStats
from shared.atomic_files import whole_directory
from shared.logprobs import choose_forward
from shared.models import load_model, load_tokenizer, save_model, use_threads


@dataclass(frozen=True)
class SftResult:
    """How a run ended. eval_loss: held-out, nats a completion token. seconds: of training, in all processes."""

    finished: bool
    steps: int
    eval_loss: float
    seconds: float


def sft(config: SftConfig, console: Console) -> SftResult:
    """Trains until the last step or a request to stop. RUN_DIR/model or a checkpoint then has the weights.

    Raises UserError for a configuration or data that cannot be used, RunFailed for a loss that is not finite,
    and for a disk that is full.
    """
    use_threads(config.threads)
    directory = RunDirectory(config.run_dir)
    resumed = directory.open(config, console, resume=config.resume)
    checkpoints = Checkpoints(directory.checkpoints, keep=config.checkpoint.save_total_limit)
    checkpoint = checkpoints.newest() if resumed else None
    state = read_state(checkpoint) if checkpoint else TrainState()
    # Without a checkpoint step 0 is evaluated again, and its record is dropped too.
    truncate_metrics(directory.metrics, state.step if checkpoint else -1)
    source, revision = (str(checkpoint), None) if checkpoint else (config.model, config.revision)
    model = load_model(source, revision=revision, device=config.device, dtype=config.dtype)
    tokenizer = load_tokenizer(source, revision=revision)
    data = load_demonstrations(
        config, model, tokenizer, lambda text: console.print(text, highlight=False, soft_wrap=True)
    )
    learner = make_learner(config, model)
    if checkpoint:
        restore(checkpoint, learner.weights)
    metrics = MetricsFile(directory.metrics)
    try:
        with StopRequest() as stop, _bar(console) as bar:
            run = SftRun(config, directory, state, data, learner, tokenizer, checkpoints, metrics, bar)
            return run.run(stop)
    finally:
        metrics.close()


def make_learner(config: SftConfig, model: PreTrainedModel) -> SupervisedLearner:
    if config.gradient_checkpointing:
        checkpoint_layers(model)
    return SupervisedLearner(
        model, choose_forward(model), optimizer=config.optimizer, micro_batch_tokens=config.micro_batch_tokens
    )


@dataclass
class SftRun:
    """A run from its state at the start of this process to its end."""

    config: SftConfig
    directory: RunDirectory
    state: TrainState
    data: DemonstrationSet
    learner: SupervisedLearner
    tokenizer: PreTrainedTokenizerBase
    checkpoints: Checkpoints
    metrics: MetricsFile
    bar: Progress
    eval_loss: float = math.nan

    def run(self, stop: StopRequest) -> SftResult:
        """Trains the remaining steps and saves the model, or saves a checkpoint when it is stopped."""
        state, steps = self.state, self.data.steps
        task = self.bar.add_task("", total=steps, completed=state.step)
        if state.step == 0:
            self._evaluate()
        while state.step < steps and not stop:
            began = time.monotonic()
            self._step()
            state.training_seconds += time.monotonic() - began
            self.bar.update(task, completed=state.step)
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
        return SftResult(finished, state.step, self.eval_loss, state.training_seconds)

    def _step(self) -> None:
        lr = self.config.optimizer.learning_rate * lr_factor(self.state.step, self.config.optimizer, self.data.steps)
        stats = self.learner.step(self.data.batch(self.state.step), lr=lr)
        if stats.not_finite:
            raise _not_finite(f"loss or gradient of step {self.state.step + 1}")
        self.state.step += 1
        self._record(stats)

    def _record(self, stats: SupervisedStats) -> None:
        self.metrics.write({"kind": "step", "step": self.state.step, **asdict(stats)})
        self.bar.update(self.bar.task_ids[0], description=f"loss {stats.loss:.4f}")

    def _evaluate(self) -> None:
        self.eval_loss = loss = self.learner.loss(self.data.eval_rows)
        perplexity = math.exp(min(loss, 700))  # exp of more overflows
        record = {"kind": "evaluation", "step": self.state.step, "eval_loss": loss, "perplexity": perplexity}
        self.metrics.write(record)
        if not math.isfinite(loss):  # no later step would show that the last update broke the weights
            raise _not_finite(f"held-out loss after step {self.state.step}")
        self.bar.console.print(
            f"step {self.state.step}/{self.data.steps} · held-out loss {loss:.4f} · perplexity {perplexity:.4g}",
            highlight=False,
        )

    def _checkpoint(self) -> None:
        with write_failures(f"the checkpoint of step {self.state.step}"):
            self.checkpoints.save(self.state, self.learner.model, self.tokenizer, self.learner.weights)

    def _save_model(self) -> None:
        with write_failures(self.directory.model), whole_directory(self.directory.model) as temporary:
            save_model(self.learner.model, self.tokenizer, temporary)
            shutil.rmtree(self.directory.model, ignore_errors=True)  # from an earlier process that finished


def _not_finite(what: str) -> RunFailed:
    return RunFailed(
        f"the {what} is not finite: lower optimizer.learning_rate, or set dtype = float32; --resume continues from the "
        "newest checkpoint"
    )


def _bar(console: Console) -> Progress:
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TextColumn("{task.description}"))
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
