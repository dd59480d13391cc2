"""What TRL's users read of a run: the history, the state, and what callbacks get."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback

from policy_trainer.config import TrainConfig
from policy_trainer.processes.lifecycle.timing import Stopwatch
from policy_trainer.reporting.metrics import without_nan
from policy_trainer.reporting.samples import SampledCompletion, SampledGroup
from policy_trainer.rollout.sampling.sampler import SamplingParams
from policy_trainer.trainer.evaluation.results import Evaluation, Transcript, summarise
from policy_trainer.trainer.observer import RunStart
from policy_trainer.trl import GRPOConfig
from policy_trainer.trl.logs import Logs
from policy_trainer.trl.mapping import settings
from policy_trainer.trl.rewards import reward_names
from policy_trainer.trl.steps import count_steps

ROWS = 16
NAMES = {"caller:f": "f", "m:g": "g"}
UPDATE = {
    "loss": 0.5, "policy_loss": 0.7, "aux_loss": None, "kl": 0.01, "entropy": 2.0, "entropy_coef": 0.0,
    "clip_ratio": 0.3, "clip_ratio_low": 0.1, "clip_ratio_low_min": 0.0, "clip_ratio_high": 0.2,
    "clip_ratio_high_max": 0.5, "grad_norm": 3.0, "learning_rate": 0.1,
}  # fmt: skip
# What a run without a reference, tools or an entropy bonus logs of a generation batch, and of an update.
OF_BATCH = {
    "num_tokens", "reward", "reward_std", "frac_reward_zero_std", "completions/clipped_ratio",
    *(f"completions/{kind}_{ended}length" for kind in ("mean", "min", "max") for ended in ("", "terminated_")),
    *(f"rewards/{name}/{kind}" for name in "fg" for kind in ("mean", "std")),
}  # fmt: skip
OF_UPDATE = {
    "loss", "grad_norm", "learning_rate", "entropy", "step_time", "epoch",
    *(f"clip_ratio/{kind}" for kind in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")),
}  # fmt: skip


def record(step: int, updates: int = 1, **given: Any) -> dict[str, Any]:
    """Of a step with one prompt of 3 tokens and 8 completions, of which 2 have no reward by g."""
    rewards = {"reward": 1.0, "reward/caller:f": 1.0, "reward/m:g": 2.0, "unrewarded": 0, "unrewarded/caller:f": 0}
    rewards |= {"unrewarded/m:g": 2, "reward_std": 1.0, "reward_std/caller:f": 1.0, "reward_std/m:g": 1.0}
    lengths = {"completion_length_mean": 4.0, "completion_length_min": 1, "completion_length_max": 9}
    lengths |= {"finished_length_mean": None, "finished_length_min": None, "finished_length_max": None}
    return {
        "kind": "step", "step": step, "completions": 8, "prompt_length_mean": 3.0, "truncated": 1.0, **lengths,
        **rewards, "frac_reward_zero_std": 0.5, "training_seconds": 2.0, "waiting_seconds": 1.0, "learning_rate": 0.1,
        "eval_reward": 9.0, "each_update": [{**UPDATE, "loss": 0.5 + place} for place in range(updates)], **given,
    }  # fmt: skip


def make(tmp_path: Path, callbacks: Any = (), **given: Any) -> Logs:
    args = GRPOConfig(str(tmp_path), **{"logging_steps": 1, **given})
    steps = count_steps(args, ROWS)
    values = settings(args, steps, in_chat=False, evaluates=True)
    logs = Logs(callbacks, args, steps, rows=ROWS)
    logs.attach(TrainConfig.model_validate({**values, "model": "m", "rewards": [*NAMES]}), NAMES, {"eval": 2})
    logs.stopwatch = Stopwatch()
    return logs


def begin(logs: Logs, step: int = 0, past: Any = ()) -> None:
    model: Any = SimpleNamespace(name="model")
    logs.begin(RunStart(TrainConfig(model="m", max_steps=100, run_dir=Path("x")), model, model, "packed", step, past))


def run(logs: Logs, steps: int, updates: int = 1, **given: Any) -> list[dict[str, Any]]:
    begin(logs)
    for step in range(1, steps + 1):
        logs.begin_step()
        logs.end_step(record(step, updates, **given), list)
    logs.end()
    return logs.state.log_history


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, float]] = []
        self.logs: list[set[str]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.seen.append(("begin", state.global_step, state.epoch))

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.seen.append(("end", state.global_step, state.epoch))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self.logs.append(set(logs))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **others: Any) -> None:
        self.seen.append(("evaluate", state.global_step, metrics.get("eval_reward")))


def test_the_names_are_those_of_trl(tmp_path: Path) -> None:
    callback = Recorder()
    first, last = run(make(tmp_path, [callback], max_steps=1), 1)
    assert {*first} == OF_BATCH | OF_UPDATE | {"step"}
    assert {*last} == {
        "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "train_loss", "epoch",
        "step",
    }  # fmt: skip
    assert callback.logs == [{*first} - {"step"}, {*last} - {"step"}]


def test_the_units_are_those_of_trl(tmp_path: Path) -> None:
    first, _ = run(make(tmp_path, max_steps=1), 1)
    assert first["num_tokens"] == 8 * 3 + 8 * 4 and first["step_time"] == 3.0
    assert first["reward_std"] == pytest.approx(math.sqrt(8 / 7))
    assert first["rewards/g/std"] == pytest.approx(math.sqrt(6 / 5)), "of the 6 that it judged"
    assert first["completions/mean_terminated_length"] == 0.0, "none has ended"
    assert (first["epoch"], first["step"]) == (1 / ROWS, 1)
    assert [first[f"clip_ratio/{kind}"] for kind in ("low_min", "low_mean", "high_mean", "high_max")] == [
        0.0, 0.1, 0.2, 0.5,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "more", "fewer"),
    [
        ({"beta": 0.1}, {"kl"}, set()),
        ({"entropy_coef": 0.1}, {"policy_loss", "entropy_coef"}, set()),
        ({"loss_type": "sapo"}, set(), {name for name in OF_UPDATE if name.startswith("clip_ratio/")}),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {"cispo_clip_ratio"},
            {name for name in OF_UPDATE if name.startswith("clip_ratio/")},
        ),
    ],
)
def test_some_names_depend_on_the_arguments(given: Any, more: set[str], fewer: set[str], tmp_path: Path) -> None:
    first, _ = run(make(tmp_path, max_steps=1, **given), 1)
    assert {*first} == (OF_BATCH | OF_UPDATE | {"step"} | more) - fewer


def test_metrics_of_routers_tools_and_functions(tmp_path: Path) -> None:
    given = {"tools/call_frequency": 0.5, "tools/failure_frequency": 0.25, "tools/call_frequency/f": 0.5}
    routed = [{**UPDATE, "aux_loss": 2.0}]
    first, _ = run(make(tmp_path, max_steps=1), 1, **{**given, "logged/mine/x": 3.0, "each_update": routed})
    assert {*first} - OF_BATCH - OF_UPDATE == {
        "step", "tools/call_frequency", "tools/failure_frequency", "mine/x", "aux_loss",
    }  # fmt: skip
    assert first["mine/x"] == 3.0 and first["aux_loss"] == 2.0


def test_steps_are_updates(tmp_path: Path) -> None:
    callback = Recorder()
    logs = make(tmp_path, [callback], max_steps=4, num_iterations=2)
    history = run(logs, 2, updates=2)
    epochs = [step / (2 * ROWS) for step in range(5)]
    assert callback.seen == [
        entry for step in range(4) for entry in (("begin", step, epochs[step]), ("end", step + 1, epochs[step + 1]))
    ]
    assert [each["step"] for each in history] == [1, 2, 3, 4, 4]
    assert [each.get("loss") for each in history] == [0.5, 1.5, 0.5, 1.5, None]
    assert [each.get("step_time") for each in history] == [2.0, 1.0, 2.0, 1.0, None], "waiting counts with the first"
    assert ["reward" in each for each in history] == [True, False, True, False, False]
    assert [each.get("num_tokens") for each in history] == [56, None, 112, None, None]
    state = logs.state
    assert (state.global_step, state.max_steps, state.num_train_epochs, state.train_batch_size) == (4, 4, 1, 8)
    assert (state.num_input_tokens_seen, state.logging_steps, state.save_steps) == (112, 1, 500)
    assert history[-1]["train_loss"] == 1.0 and logs.summary == {
        name: value for name, value in history[-1].items() if name != "step"
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"logging_steps": 3}, [3, 4]),
        ({"logging_steps": 3, "logging_first_step": True}, [1, 3, 4]),
        ({"logging_steps": 0.5}, [2, 4, 4]),
        ({"logging_steps": 10}, [4]),
        ({"logging_strategy": "no"}, [4]),
        ({"logging_strategy": "epoch"}, [4, 4]),
    ],
)
def test_logs_are_due_as_in_trl(given: Any, expected: list[int], tmp_path: Path) -> None:
    history = run(make(tmp_path, max_steps=4, **given), 4)
    assert [each["step"] for each in history] == expected
    assert history[-1]["train_loss"] == 0.5
    assert ("num_tokens" in history[-1]) == (expected[-2:] != [4, 4]), "what was not logged comes last"


def test_logs_are_means_since_the_last(tmp_path: Path) -> None:
    logs = make(tmp_path, max_steps=2, logging_steps=2)
    begin(logs)
    for step, reward, mine in ((1, 1.0, 3.0), (2, None, 5.0)):
        update = {**UPDATE, "loss": step, "grad_norm": step, "learning_rate": step}
        logs.begin_step()
        given = {"reward": reward, "reward/m:g": None, "logged/mine": mine, "each_update": [update]}
        logs.end_step(record(step, **given), list)
    (entry,) = logs.state.log_history
    assert (entry["loss"], entry["grad_norm"], entry["learning_rate"]) == (1.5, 2, 2)
    assert (entry["reward"], entry["rewards/g/mean"], entry["mine"]) == (1.0, None, 4.0), "of the values that are known"


def test_a_batch_that_cannot_train_still_counts(tmp_path: Path) -> None:
    history = run(make(tmp_path, max_steps=1), 1, each_update=[])
    assert (history[0]["loss"], history[0]["grad_norm"], history[0]["step"]) == (0.0, 0.0, 1)


def sampled(*rewards: float) -> SampledGroup:
    completions = tuple(
        SampledCompletion("x", reward, {"caller:f": reward, "m:g": math.nan}, None, place + 1, bool(place))
        for place, reward in enumerate(rewards)
    )
    return SampledGroup(0, "eval", None, None, 0, "p", None, completions)


def answered(problem: int, *rewards: float, **logged: float) -> tuple[Transcript, ...]:
    """Answers of 1, 2, … tokens to a held-out problem, of which only the first is cut off."""
    return tuple(
        Transcript(
            "p", "x", "", math.nan, reward, {"caller:f": reward, "m:g": math.nan}, number + 1, bool(number), "",
            logged=logged, place=problem,
        )
        for number, reward in enumerate(rewards)
    )  # fmt: skip


def evaluated(*groups: tuple[Transcript, ...]) -> Evaluation:
    return summarise(groups, SamplingParams(len(groups[0]), 8, 1.0), left_out=0)


def test_an_evaluation_has_trls_names(tmp_path: Path) -> None:
    """Two batches, of one group each."""
    callback = Recorder()
    given = {"num_generations_eval": 2, "per_device_eval_batch_size": 2, "eval_strategy": "steps", "eval_steps": 1}
    logs = make(tmp_path, [callback], max_steps=1, **given)
    begin(logs)
    logs.end_step(record(1), list)
    logs.stopwatch.seconds["evaluate"] = 2.0
    figures = logs.figures(evaluated(answered(0, 0.0, 2.0, mine=2.0), answered(1, 1.0, 1.0, mine=3.0)))
    evaluation = {"kind": "evaluation", "step": 1, "reward": 1.0, "rewards": {}, **figures}
    logs.evaluated(evaluation, best=True)
    entry = logs.state.log_history[-1]
    assert {name.removeprefix("eval_") for name in entry} == (OF_BATCH | OF_UPDATE | {"step"}) - {
        "grad_norm", "learning_rate", "entropy", "step_time",
    } | {"runtime", "samples_per_second", "steps_per_second", "mine"}  # fmt: skip
    assert entry["eval_reward_std"] == pytest.approx(math.sqrt(2) / 2), "the mean of the batches, as in TRL"
    assert entry["eval_frac_reward_zero_std"] == 0.5 and entry["eval_rewards/g/mean"] is None
    assert (entry["eval_completions/mean_length"], entry["eval_completions/mean_terminated_length"]) == (1.5, 2.0)
    assert entry["eval_loss"] == pytest.approx(-math.sqrt(0.5) * (2 - 1) / 3 / 2, rel=1e-3), "longer answers weigh more"
    assert (entry["eval_runtime"], entry["eval_samples_per_second"], entry["eval_steps_per_second"]) == (2.0, 1.0, 0.5)
    assert entry["eval_mine"] == 2.5
    assert (entry["eval_num_tokens"], entry["step"], entry["epoch"]) == (56, 1, 1 / ROWS)
    assert callback.seen[-1] == ("evaluate", 1, 1.0) and callback.logs[-1] == {*entry} - {"step"}
    assert (logs.state.best_metric, logs.state.best_global_step) == (1.0, 1)


def test_each_dataset_has_an_entry(tmp_path: Path) -> None:
    """The first problem of the second dataset was left out, and all of the third."""
    callback = Recorder()
    logs = make(tmp_path, [callback], max_steps=1, num_generations_eval=2, per_device_eval_batch_size=2)
    begin(logs)
    logs.stopwatch.seconds["evaluate"] = 2.0
    groups = (answered(0, 0.0, 2.0), answered(2, 3.0, 3.0, mine=1.0), answered(3, 5.0, 5.0), answered(4, 7.0, 7.0))
    figures = logs.figures(evaluated(*groups), {"eval_a": 1, "eval_b": 3, "eval_c": 1, "test_d": 1})
    logs.evaluated({"kind": "evaluation", "step": 0, "reward": 4.0, "rewards": {}, **figures}, best=False)
    a, b, c, d = logs.state.log_history
    assert (a["eval_a_reward"], b["eval_b_reward"], c["eval_c_reward"]) == (1.0, 4.0, 7.0)
    assert (a["eval_a_runtime"], b["eval_b_runtime"]) == (0.5, 1.0) and b["eval_b_mine"] == 1.0
    assert b["eval_reward"] == 4.0 and "eval_runtime" not in b, "as TRL names its own metrics"
    assert "eval_a_mine" not in a and {*d} == {"epoch", "step"}
    assert callback.logs == [{*entry} - {"step"} for entry in (a, b, c, d)]


def test_an_evaluation_masks_truncated_completions_as_training_does(tmp_path: Path) -> None:
    """The first of each group was cut off, and counts for the advantage of the other one."""
    given = {"num_generations_eval": 2, "per_device_eval_batch_size": 2, "mask_truncated_completions": True}
    logs = make(tmp_path, max_steps=1, **given)
    begin(logs)
    logs.stopwatch.seconds["evaluate"] = 2.0
    cut_off = answered(1, 0.0) * 2
    figures = logs.figures(evaluated(answered(0, 0.0, 2.0), cut_off))
    assert figures["trl"]["eval"]["loss"] == pytest.approx((-math.sqrt(0.5) + 0) / 2, rel=1e-3)


def test_a_resumed_run_has_the_same_history(tmp_path: Path) -> None:
    make_logs = partial(make, tmp_path, max_steps=6, num_iterations=2, logging_steps=1, eval_strategy="steps")
    logs = make_logs()
    begin(logs)
    past: list[dict[str, Any]] = []
    for step in (1, 2):
        logs.begin_step()
        past.append(record(step, 2, **{"reward/m:g": math.nan}))
        logs.end_step(past[-1], list)
        logs.stopwatch.seconds["evaluate"] = float(step)
        past.append({"kind": "evaluation", "step": step, "reward": 2.0 - step, "rewards": {}})
        past[-1] |= logs.figures(evaluated(answered(0, 0.0, 2.0)))
        logs.evaluated(past[-1], best=step == 1)
    past.append({"kind": "health", "step": 2})
    resumed = make_logs()
    begin(resumed, 2, json.loads(json.dumps(without_nan(past))))
    assert resumed.state.log_history == logs.state.log_history
    names = ("global_step", "epoch", "num_input_tokens_seen", "best_metric", "best_global_step")
    assert [getattr(resumed.state, name) for name in names] == [getattr(logs.state, name) for name in names]
    resumed.end_step(record(3, 2), list)
    assert [each["step"] for each in resumed.state.log_history[-2:]] == [5, 6]
    resumed.end()
    assert resumed.summary["train_loss"] == 1.0


def test_rewards_have_trls_names() -> None:
    def f(completions: Any, **columns: Any) -> list[float]:
        return []

    class RewardScorer:
        def __call__(self, completions: Any) -> list[float]:
            return []

    class Maze:
        def get_reward(self) -> float:
            return 1.0

    class Field:
        pass

    model = SimpleNamespace(config=SimpleNamespace(_name_or_path="org/judge"))
    assert reward_names([f, partial(f, x=1), RewardScorer(), model, "org/other"], Maze) == [
        "f", "f", "RewardScorer", "judge", "other", "Maze",
    ]  # fmt: skip
    assert reward_names([f], None) == reward_names([f], Field) == ["f"]
    assert reward_names([f], {"a": Field, "b": Maze}) == ["f", "Maze"]


def test_the_latest_completions_are_columns(tmp_path: Path) -> None:
    logs = make(tmp_path, max_steps=1)
    begin(logs)
    logs.end_step(record(1), lambda: [sampled(0.0, 2.0)])
    table = logs.completions()
    assert table["prompt"] == ["p", "p"] and table["completion"] == ["x", "x"] and table["images"] == []
    logs.end_step(record(1), lambda: [replace(sampled(0.0, 2.0), images=("data:,",))])
    assert logs.completions()["images"] == [("data:,",)] * 2
    logs = make(tmp_path, max_steps=1, log_multimodal=False)
    begin(logs)
    logs.end_step(record(1), lambda: [replace(sampled(0.0), images=("data:,",))])
    assert logs.completions()["images"] == []
    assert table["rewards"]["f"] == [0.0, 2.0] and table["advantages"] == [None, None] and table["extra"] == {}


def test_rows_are_needed_for_epochs(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path), max_steps=4, logging_steps=1)
    logs = Logs([], args, count_steps(args, None), rows=None)
    logs.attach(TrainConfig(model="m"), NAMES, {})
    history = run(logs, 4)
    assert [each["epoch"] for each in history] == [0.25, 0.5, 0.75, 1.0, 1.0], "as in TRL: of all updates"
