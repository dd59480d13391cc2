"""What callers' functions and transformers' callbacks see of a run, and what they may ask for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import EarlyStoppingCallback, ProgressCallback, TrainerCallback

from policy_trainer import GRPO, StopTraining, UserError
from policy_trainer.config import TrainConfig
from policy_trainer.python_api.callbacks import EVENTS, Callbacks, StepFunction, callback_input, step_input
from policy_trainer.trainer.observer import RunStart

CONFIG = TrainConfig(model="m", max_steps=4, run_dir=Path("runs/x"))


def no_groups() -> list[Any]:
    return []


def beginning(step: int = 0, past: Any = ()) -> RunStart:
    model: Any = SimpleNamespace(name="model")
    return RunStart(CONFIG, model, model, "packed", step, past)


def record(step: int, **metrics: Any) -> dict[str, Any]:
    return {"kind": "step", "step": step, **metrics}


class Recorder(TrainerCallback):
    def __init__(self, *, asks: str = "", at: int = 0, during: str = "on_step_end") -> None:
        self.seen: list[tuple[str, int, Any]] = []
        self._asks = asks, at, during

    def __getattribute__(self, name: str) -> Any:
        if name not in EVENTS:
            return super().__getattribute__(name)

        def event(args: Any, state: Any, control: Any, **others: Any) -> Any:
            self.seen.append((name, state.global_step, others.get("logs", others.get("metrics"))))
            asks, at, during = self._asks
            if asks and (state.global_step, name) == (at, during):
                setattr(control, asks, True)
                return control
            return None

        return event


def run(observer: Callbacks, *, evaluations: dict[int, float] | None = None, steps: int = 4) -> list[tuple[Any, ...]]:
    """What the trainer does, with the requested after each step."""
    requested = []
    observer.begin(beginning())
    for step in range(1, steps + 1):
        observer.begin_step()
        observer.end_step(record(step, reward=float(step), tokens=10, unknown=None, batch_ids=["a"]), no_groups)
        if evaluations and step in evaluations:
            figures = {"reward": evaluations[step], "accuracy": None, "rewards": {}}
            observer.evaluated({"step": step, **figures}, best=step == 1)
        requested.append((observer.requested.stop, observer.requested.save, observer.requested.evaluate))
        observer.saved(Path(f"checkpoints/step-{step:08}"))
    observer.end()
    return requested


def test_events_come_in_the_order_of_transformers() -> None:
    callback = Recorder()
    observer = Callbacks([callback])
    run(observer, evaluations={2: 0.5}, steps=2)
    assert [(name, step) for name, step, _ in callback.seen] == [
        ("on_init_end", 0), ("on_train_begin", 0),
        ("on_step_begin", 0), ("on_step_end", 1), ("on_log", 1), ("on_save", 1),
        ("on_step_begin", 1), ("on_step_end", 2), ("on_log", 2), ("on_evaluate", 2), ("on_save", 2),
        ("on_train_end", 2),
    ]  # fmt: skip
    assert callback.seen[4][2] == {"reward": 1.0, "tokens": 10.0, "epoch": 0.0}
    assert callback.seen[9][2] == {"eval_reward": 0.5}
    assert [entry["step"] for entry in observer.state.log_history] == [1, 2, 2]
    assert observer.state.num_input_tokens_seen == 20 and observer.state.max_steps == 4


@pytest.mark.parametrize(
    ("asks", "during", "expected"),
    [
        ("should_training_stop", "on_step_end", [(False,) * 3, (True, False, False), (True, False, False)]),
        ("should_training_stop", "on_log", [(False,) * 3, (True, False, False), (True, False, False)]),
        ("should_save", "on_step_end", [(False,) * 3, (False, True, False), (False,) * 3]),
        ("should_evaluate", "on_step_end", [(False,) * 3, (False, False, True), (False,) * 3]),
    ],
)
def test_a_control_reaches_the_trainer(asks: str, during: str, expected: list[Any]) -> None:
    observer = Callbacks([Recorder(asks=asks, at=2, during=during)])
    assert run(observer, steps=3) == expected
    observer.begin(beginning())
    assert not observer.requested.stop, "the next run begins anew"


def test_early_stopping_ends_a_run_that_gets_no_better() -> None:
    observer = Callbacks([EarlyStoppingCallback(early_stopping_patience=2)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.trainer_callback.logger.warning", lambda message: None)
        requested = run(observer, evaluations={1: 0.5, 2: 0.4, 3: 0.3})
    assert [stop for stop, _, _ in requested] == [False, False, True, True]
    state = observer.state
    assert (state.best_metric, state.best_global_step) == (0.5, 1)
    assert state.best_model_checkpoint == "checkpoints/step-00000001"


def test_a_resumed_run_has_the_history_of_the_earlier_process() -> None:
    observer = Callbacks([Recorder()])
    past = [
        record(1, reward=0.5, eval_reward=0.1),
        {"kind": "evaluation", "step": 1, "reward": 0.25, "rewards": {"a": 0.25}},
    ]
    observer.begin(beginning(1, past))
    assert observer.state.global_step == 1 and observer.state.best_metric == 0.25
    assert observer.state.log_history == [
        {"step": 1, "reward": 0.5}, {"eval_reward": 0.25, "eval_reward/a": 0.25, "step": 1},
    ]  # fmt: skip


def test_a_resumed_run_knows_its_best_evaluation() -> None:
    """By accuracy, which it has: the rewards differ otherwise."""
    observer = Callbacks([EarlyStoppingCallback(early_stopping_patience=1)])
    values = [(1, 0.9, 1.0), (2, 0.7, 1.4)]
    past = [
        {"kind": "evaluation", "step": n, "accuracy": right, "reward": reward, "rewards": {}}
        for n, right, reward in values
    ]
    observer.begin(beginning(2, past))
    assert (observer.state.best_metric, observer.state.best_global_step) == (0.9, 1)
    observer.begin_step()
    observer.evaluated({"step": 3, "accuracy": 0.95, "reward": 1.1, "rewards": {}}, best=True)
    assert not observer.requested.stop and observer.state.best_metric == 0.95


def test_events_that_a_run_does_not_have_are_named() -> None:
    with pytest.warns(UserWarning, match="ProgressCallback is not called at on_predict, on_prediction_step: a run has"):
        callback_input([ProgressCallback])
    (made,) = callback_input([EarlyStoppingCallback])
    assert isinstance(made, EarlyStoppingCallback)
    with pytest.raises(UserError, match=r"callbacks: must be transformers\.TrainerCallbacks, got int"):
        GRPO(model="m", callbacks=[3])  # type: ignore[list-item]


def test_a_step_function_may_end_the_run() -> None:
    def raises(metrics: Any) -> None:
        raise StopTraining

    answers = [(lambda metrics: np.bool_(False), True), (lambda metrics: 0, False), (raises, True), (print, False)]
    for function, stops in answers:
        for observer in (StepFunction(step_input(function)), Callbacks([], step_input(function))):
            observer.begin(beginning())
            observer.end_step(record(1), no_groups)
            assert observer.requested.stop is stops


def test_a_function_of_steps_gets_what_it_names() -> None:
    def makes() -> list[Any]:
        return ["a group"]

    assert step_input(lambda metrics: metrics)({"step": 1}, makes) == {"step": 1}
    assert step_input(lambda metrics, groups=(): groups)({}, makes) == ["a group"]
    assert step_input(lambda metrics, texts: texts)({}, makes) == ["a group"]
    assert step_input(lambda metrics, log="mine": log)({}, makes) == "mine"
    assert step_input(print)({}, makes) is None
