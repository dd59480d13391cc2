"""What the caller of `GRPO` sees of its run: `on_step`, and callbacks written for transformers' Trainer.

A callback's events are called where they exist in a run: at its beginning and end, before and after each step, with its
logs, after evaluations and checkpoints. Their `control` may stop the run, or have it evaluated or saved after a step.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from policy_trainer.config import TrainConfig
from policy_trainer.data.user_code import accepts
from policy_trainer.processes.lifecycle.endings import StopTraining
from policy_trainer.trainer.observer import Groups, Metrics, Observer, RunStart
from shared.errors import UserError
from shared.process import quick_imports

if TYPE_CHECKING:
    from transformers import TrainerCallback

    AnyCallback = TrainerCallback | type[TrainerCallback]

OnStep = Callable[[Metrics, Groups], object]

# What callbacks get outside of a run.
_NOTHING: Mapping[str, Any] = {"model": None, "processing_class": None}

# Events of transformers' Trainer that a run has.
EVENTS = {
    "on_init_end", "on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end",
}  # fmt: skip


def step_input(function: Callable[..., object]) -> OnStep:
    """The function as the trainer calls it. Groups are made only for a function that needs them, or names them.

    Raises UserError for what takes neither a step's metrics nor its metrics and groups.
    """
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if callable(function) else type(function).__name__
        raise UserError(f"on_step: must be a function of a step's metrics, got {kind}")
    reason = accepts(function, {})
    if reason is None and "groups" not in inspect.signature(function).parameters:
        return lambda metrics, groups: function(metrics)
    if accepts(function, {}, []) is not None:
        raise UserError(
            f"on_step: is called as f(metrics) or f(metrics, groups), but {reason or 'groups is keyword-only'}"
        )
    return lambda metrics, groups: function(metrics, groups())


class StepFunction(Observer):
    """Calls the caller's function, if there is one, after each step. Returning False, or raising StopTraining, ends the
    run with a checkpoint."""

    def __init__(self, on_step: OnStep | None) -> None:
        super().__init__()
        self._on_step = on_step

    def end_step(self, record: Metrics, groups: Groups) -> None:
        if self._on_step is None:
            return
        try:
            answer = self._on_step(record, groups)
        except StopTraining:
            answer = False
        self.requested.stop |= isinstance(answer, bool | np.bool_) and not answer


def callback_input(callbacks: "Iterable[AnyCallback]") -> "list[TrainerCallback]":
    """The callbacks, of classes an instance. Warns of events that a run does not have.

    Raises UserError for what is no callback of transformers.
    """
    with quick_imports():
        from transformers import TrainerCallback  # slow to import, unless the program has done it for its callbacks

    several = [each() if isinstance(each, type) else each for each in callbacks]
    for each in several:
        if not isinstance(each, TrainerCallback):
            raise UserError(f"callbacks: must be transformers.TrainerCallbacks, got {type(each).__name__}")
        names = [name for name in dir(TrainerCallback) if name.startswith("on_") and name not in EVENTS]
        unused = [name for name in names if getattr(type(each), name) is not getattr(TrainerCallback, name)]
        if unused:
            warnings.warn(
                f"callbacks: {type(each).__name__} is not called at {', '.join(unused)}: a run has no such event; it "
                f"has {', '.join(sorted(EVENTS))}",
                stacklevel=2,
            )
    return several


class Callbacks(StepFunction):
    """Calls transformers' callbacks, with the state of this run, after the caller's function. Each step is logged.

    args: passed to them as TrainingArguments; None: an object with a few of its fields, from the run's settings.
    """

    def __init__(
        self, callbacks: "Iterable[TrainerCallback]", on_step: OnStep | None = None, *, args: Any = None
    ) -> None:
        super().__init__(on_step)
        with quick_imports():
            from transformers import TrainerControl, TrainerState

        self.callbacks = [*callbacks]
        self._args = args
        self.state = TrainerState()
        self.control = TrainerControl()
        self._others = _NOTHING
        self._best_step: int | None = None
        # Called with each checkpoint, before the callbacks.
        self.on_checkpoint: Callable[[Path], object] = lambda checkpoint: None

    def begin(self, run: RunStart) -> None:
        super().begin(run)
        self.control.should_training_stop = False
        if self._args is None:
            self._args = _arguments(run.config)
        self._others = {"model": run.model, "processing_class": run.tokenizer}
        self._set_state(run)
        self.state.log_history = []
        for record in run.past:
            self._replay(record)
        self._call("on_init_end")
        self._call("on_train_begin")

    def _set_state(self, run: RunStart) -> None:
        """Sets the fields that are constant during a run, and the number of steps done."""
        self.state.max_steps, self.state.global_step = run.config.max_steps, run.step
        self.state.num_train_epochs = round(run.config.num_train_epochs or 0)
        self.state.logging_steps = 1
        self.state.eval_steps, self.state.save_steps = (
            run.config.evaluation.eval_steps,
            run.config.checkpoint.save_steps,
        )

    def _replay(self, record: Metrics) -> None:
        """Adds a record of an earlier process to the history; no callback is called."""
        if record["kind"] == "evaluation":
            self.state.log_history.append(_evaluation(record))
            self._compare(record)
        elif record["kind"] == "step":
            self.state.log_history.append(_numbers(record))

    def _compare(self, record: Metrics) -> None:
        """Keeps an earlier process's evaluation if it is the best so far."""
        value = record.get(self._measure(record))
        if self.state.best_metric is None or (value or -math.inf) > self.state.best_metric:
            self._keep_best(record)

    def begin_step(self) -> None:
        self.control._new_step()
        self._call("on_step_begin")

    def end_step(self, record: Metrics, groups: Groups) -> None:
        super().end_step(record, groups)
        self._count(record)

    def _count(self, record: Metrics) -> None:
        """Calls the events of a step."""
        self.state.global_step = record["step"]
        self.state.epoch = self.state.num_train_epochs * record["step"] / max(self.state.max_steps, 1)
        self.state.num_input_tokens_seen += record.get("tokens") or 0
        self._call("on_step_end")
        self._log({**_numbers(record), "epoch": self.state.epoch, "step": record["step"]})

    def _log(self, entry: Metrics) -> None:
        """Adds an entry to the history, and calls the callbacks with it."""
        self.control.should_log = False
        self.state.log_history.append(entry)
        self._call("on_log", logs={name: value for name, value in entry.items() if name != "step"})

    def evaluated(self, record: Metrics, *, best: bool) -> None:
        self._measure(record)
        self.control.should_evaluate = False
        entry = _evaluation(record)
        self.state.log_history.append(entry)
        self._call("on_evaluate", metrics={name: value for name, value in entry.items() if name != "step"})
        if best:  # after the event: EarlyStoppingCallback compares with the earlier best
            self._keep_best(record)

    def _measure(self, record: Metrics) -> str:
        """By which evaluations are compared: without arguments of the caller's the accuracy, if there is one."""
        if isinstance(self._args, SimpleNamespace):  # ours
            self._args.metric_for_best_model = "reward" if record.get("accuracy") is None else "accuracy"
        return str(self._args.metric_for_best_model or "reward").removeprefix("eval_")

    def _keep_best(self, record: Metrics) -> None:
        self.state.best_metric, self._best_step = record.get(self._measure(record)), record["step"]
        self.state.best_global_step = self._best_step

    def saved(self, checkpoint: Path) -> None:
        self.control.should_save = False
        if self._best_step and checkpoint.name.endswith(f"-{self._best_step:08}"):
            self.state.best_model_checkpoint = str(checkpoint)
        self.on_checkpoint(checkpoint)
        self._call("on_save")

    def end(self) -> None:
        self._call("on_train_end")
        self._others = _NOTHING  # else the model would stay in memory

    def _call(self, event: str, **values: Any) -> None:
        for callback in self.callbacks:
            given = {**self._others, "optimizer": None, "lr_scheduler": None, **values}
            self.control = getattr(callback, event)(self._args, self.state, self.control, **given) or self.control
        control, requested = self.control, self.requested
        requested.stop |= control.should_training_stop
        requested.save, requested.evaluate = control.should_save, control.should_evaluate


def _numbers(record: Metrics) -> Metrics:
    """Without the metrics of the latest evaluation, which a step repeats."""
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and not name.startswith("eval_")
    }


def _evaluation(record: Metrics) -> Metrics:
    """The entry of an evaluation in the history."""
    parts = {f"reward/{name}": value for name, value in record["rewards"].items()}
    numbers = _numbers({**record, **parts})
    step = numbers.pop("step")
    return {**{f"eval_{name}": value for name, value in numbers.items()}, "step": step}


def _arguments(config: TrainConfig) -> SimpleNamespace:
    """For callbacks: the names of TrainingArguments whose meaning a run has."""
    return SimpleNamespace(
        output_dir=str(config.run_dir),
        run_name=config.run,
        seed=config.seed,
        max_steps=config.max_steps,
        num_train_epochs=config.num_train_epochs or 0,
        learning_rate=config.optimizer.learning_rate,
        logging_strategy="steps",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=config.evaluation.eval_steps,
        save_strategy="steps",
        save_steps=config.checkpoint.save_steps,
        save_total_limit=config.checkpoint.save_total_limit,
        load_best_model_at_end=False,
        metric_for_best_model="reward",
        greater_is_better=True,
        report_to=list(config.report_to),
    )
