"""Logs what TRL's trainer logs, when it does, and maintains what callbacks see: `state`, `log_history` and `on_log`."""

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from policy_trainer.config import TrainConfig
from policy_trainer.python_api.callbacks import Callbacks
from policy_trainer.reporting.metrics import Metrics, without_nan
from policy_trainer.trainer.observer import Groups, RunStart
from policy_trainer.trl.cautions import warn_of_unjudged
from policy_trainer.trl.config import GRPOConfig
from policy_trainer.trl.metrics import Named, evaluation_metrics, generation_metrics, means, update_metrics
from policy_trainer.trl.steps import Steps

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from policy_trainer.trainer.evaluation.results import Evaluation

# Key in an evaluation's record in metrics.jsonl: its metrics under TRL's names, by the prefix of each dataset.
_FIGURES = "trl"
# The metrics of an evaluation that transformers' Trainer names.
_OF_TRAINER = ("loss", "runtime", "samples_per_second", "steps_per_second")


class Logs(Callbacks):
    """A run's log and TrainerState, as TRL keeps them. The history of a resumed run is rebuilt from metrics.jsonl.

    summary: the final log entry of the run, which `train()` returns; empty until then.
    """

    must_train = False  # as in TRL, where a run continues even if no group's rewards differ

    def __init__(
        self,
        callbacks: "Iterable[TrainerCallback]",
        args: GRPOConfig,
        steps: Steps,
        *,
        rows: int | None,
    ) -> None:
        """rows: number of training rows; None without a dataset."""
        super().__init__(callbacks, args=args)
        self.summary: Metrics = {}
        self.entropy_coef = args.entropy_coef
        self._trl, self._steps, self._rows = args, steps, rows
        self._window: list[Named] = []  # metrics since the last log
        self._losses: list[float] = []  # those of the updates in this process
        self._rates: Named = {}
        self._measured = 0.0  # seconds of the evaluations logged so far
        self._groups: Groups = list

    def attach(self, config: TrainConfig, names: Mapping[str, str], held_out: Mapping[str, int]) -> None:
        """Sets what is known only once the run is configured. config: the run's settings. names: TRL's name of each
        reward, by Tandem's. held_out: the number of rows of each evaluation dataset, by the prefix of its metrics."""
        self._config, self._names, self._held_out = config, names, held_out

    def begin(self, run: RunStart) -> None:
        self._window.clear()
        self.state.num_input_tokens_seen = self.state.global_step = 0
        self.state.epoch = 0.0
        super().begin(run)
        self._losses.clear()
        self._began, self._first = time.monotonic(), self.state.global_step

    def _set_state(self, run: RunStart) -> None:
        args, state = self._trl, self.state
        state.max_steps, state.train_batch_size = self._steps.max_updates, args.per_device_train_batch_size
        state.num_train_epochs = math.ceil(args.num_train_epochs)
        if args.max_steps > 0:
            passes = math.ceil(self._steps.max_updates / self._steps.epoch)
            state.num_train_epochs = passes if self._rows else sys.maxsize
        state.logging_steps, state.save_steps = self._interval(args.logging_steps), self._interval(args.save_steps)
        if args.eval_strategy == "steps":
            state.eval_steps = self._interval(args.logging_steps if args.eval_steps is None else args.eval_steps)

    def _interval(self, steps: float) -> int:
        """Returns an interval in updates. steps: a number of updates, or below 1 a fraction of all updates."""
        return math.ceil(steps * self._steps.max_updates) if steps < 1 else int(steps)

    def _replay(self, record: Metrics) -> None:
        if record["kind"] == "step":
            for metrics in self._updates(record):
                self._count_update(metrics)
                if self._is_due():
                    self.state.log_history.append(self._entry())
        elif record["kind"] == "evaluation":
            self.state.log_history += self._evaluations(record)
            self._compare(record)

    def end_step(self, record: Metrics, groups: Groups) -> None:
        warn_of_unjudged(record, groups)
        self._groups = groups
        super().end_step(record, groups)

    def _count(self, record: Metrics) -> None:
        for number, metrics in enumerate(self._updates(record)):
            if number:
                self._call("on_step_begin")
            self._count_update(metrics)
            self.control.should_log = self._is_due()
            self._call("on_step_end")
            if self.control.should_log:
                self._log(self._entry())

    def _updates(self, record: Metrics) -> Iterator[Named]:
        """Counts a step's generation batches, and returns the metrics of each of its updates."""
        state, args = self.state, self._trl
        state.global_step = self._steps.after(record["step"] - 1)
        batch = generation_metrics(record, args, self._names)
        state.num_input_tokens_seen += int(batch.pop("num_tokens"))
        self._window.append(batch)
        return update_metrics(record, args, self._steps.after(record["step"]) - state.global_step)

    def _count_update(self, metrics: Named) -> None:
        self._rates = {name: metrics.pop(name) for name in ("grad_norm", "learning_rate")}
        self._window.append(metrics)
        self._losses.append(metrics["loss"] if math.isfinite(metrics["loss"]) else 0.0)
        self.entropy_coef = metrics.get("entropy_coef", self.entropy_coef)
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / self._steps.epoch

    def _is_due(self) -> bool:
        args, step = self._trl, self.state.global_step
        strategy = getattr(args.logging_strategy, "value", args.logging_strategy)
        if step == 1 and args.logging_first_step:
            return True
        if strategy == "epoch":
            return step % math.ceil(self._steps.epoch) == 0 or step == self._steps.max_updates
        return strategy == "steps" and step % self.state.logging_steps == 0

    def _entry(self) -> Metrics:
        """Returns a log entry: means since the last one, with grad_norm and learning_rate of the latest update."""
        metrics = self._since_last_log()
        return self._dated({"loss": metrics.pop("loss"), **self._rates, **metrics})

    def _since_last_log(self) -> Metrics:
        window = means(self._window)
        tokens = {"num_tokens": float(self.state.num_input_tokens_seen)} if "reward" in window else {}
        self._window.clear()
        return {**tokens, **window}

    def _dated(self, metrics: Mapping[str, Any]) -> Metrics:
        return {**without_nan(metrics), "epoch": self.state.epoch, "step": self.state.global_step}

    def figures(self, evaluation: "Evaluation", sizes: Mapping[str, int] | None = None) -> Metrics:
        """Returns the metrics of each dataset, by its prefix. sizes: the number of rows of each dataset, by prefix; by
        default those of the run's evaluation datasets."""
        seconds = self.stopwatch.seconds["evaluate"] - self._measured
        self._measured += seconds
        figures, end = {}, 0
        for prefix, rows in (sizes or self._held_out).items():
            start, end = end, end + rows
            items = tuple(item for item in evaluation.transcripts if start <= item.place < end)
            part = replace(evaluation, transcripts=items)
            figures[prefix] = self._figures(part, seconds * len(items) / len(evaluation.transcripts)) if items else {}
        return {_FIGURES: figures}

    def _figures(self, evaluation: "Evaluation", seconds: float) -> Metrics:
        from policy_trainer.trainer.evaluation.results import (  # imported late: they load PyTorch
            logged_means,
            sampled_groups,
        )

        problems = list(sampled_groups(evaluation, None))
        batches = math.ceil(len(problems) / self._trl.per_device_eval_batch_size)
        metrics = evaluation_metrics(problems, self._trl, self._names, self._config)
        loss = {"loss": metrics.pop("loss")} if "loss" in metrics else {}
        speeds = {
            "runtime": round(seconds, 4),
            "samples_per_second": round(len(problems) / seconds, 3),
            "steps_per_second": round(batches / seconds, 3),
        }
        seen = {"num_tokens": float(self.state.num_input_tokens_seen)}
        return without_nan({**loss, **speeds, **seen, **metrics, **logged_means(evaluation.transcripts)})

    def evaluated(self, record: Metrics, *, best: bool) -> None:
        self.control.should_evaluate = False
        for entry in self._evaluations(record):
            self.state.log_history.append(entry)
            logs = {name: value for name, value in entry.items() if name != "step"}
            self._call("on_log", logs=dict(logs))
            self._call("on_evaluate", metrics=logs)
        if best:  # after the event: EarlyStoppingCallback compares with the earlier best
            self._keep_best(record)

    def _evaluations(self, record: Metrics) -> list[Metrics]:
        """Returns the log entry of each evaluation dataset. With another prefix than `eval`, TRL still names its own
        metrics `eval_…`: they have both names here."""
        entries = []
        for prefix, figures in record.get(_FIGURES, {}).items():
            of_trl = {f"eval_{name}": value for name, value in figures.items() if name not in _OF_TRAINER}
            entries.append(self._dated({**of_trl, **{f"{prefix}_{name}": value for name, value in figures.items()}}))
        return entries

    def _keep_best(self, record: Metrics) -> None:
        super()._keep_best(record)
        self.state.best_global_step = self._steps.after(record["step"])

    def end(self) -> None:
        """Logs the final summary, as transformers' Trainer does, including metrics that have not been logged yet."""
        rest = self._since_last_log()
        rest.pop("loss", None)
        entry = self._dated({**self._speeds(), **rest})
        self.summary = {name: value for name, value in entry.items() if name != "step"}
        self._log(entry)
        super().end()

    def _speeds(self) -> Named:
        args, steps = self._trl, self.state.global_step - self._first
        seconds = time.monotonic() - self._began
        samples = steps * args.per_device_train_batch_size * args.gradient_accumulation_steps
        if args.max_steps <= 0 and self._rows:  # as in TRL: rows, not completions
            samples = self._rows * args.num_train_epochs * steps / self._steps.max_updates
        return {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(samples / seconds, 3),
            "train_steps_per_second": round(steps / seconds, 3),
            "total_flos": 0.0,
            "train_loss": sum(self._losses) / max(steps, 1),
        }

    def completions(self) -> dict[str, Any]:
        """Returns the completions of the latest generation batch, in the columns of TRL's table."""
        groups = self._groups()
        answers = [answer for group in groups for answer in group.completions]
        pictures = [group.images for group in groups if group.images for _ in group.completions]
        columns = dict.fromkeys(column for answer in answers for column in answer.extras)
        return {
            "images": pictures if self._trl.log_multimodal else [],
            "prompt": [group.prompt for group in groups for _ in group.completions],
            "completion": [answer.text for answer in answers],
            "rewards": {theirs: [each.parts.get(ours) for each in answers] for ours, theirs in self._names.items()},
            "advantages": [answer.advantage for answer in answers],
            "extra": {column: [answer.extras.get(column) for answer in answers] for column in columns},
        }
