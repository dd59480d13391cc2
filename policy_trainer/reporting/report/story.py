"""Summarises a run in a few sentences, and computes how its time was spent."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from policy_trainer.reporting.metrics import Metrics, scoring_seconds
from policy_trainer.reporting.report.run import RecordedRun, number

# The bottleneck waits for at most this share of its time, and the others for clearly more. tools/metrics_page.py writes
# them into the dashboard's ranges.js.
BUSY, CLEAR = 0.3, 0.15
_LIMITS: Mapping[str, str] = {
    "Rollout workers": "Sampling limited this run: more workers (policy-trainer rollout, --devices), or "
    "--sampler vllm, would make it faster.",
    "Reference server": "Scoring limited this run: more GPUs for the server (ref-server serve --devices "
    "cuda:0 cuda:1), or --dtype bfloat16, would make it faster.",
    "Policy trainer": "Training limited this run: more or faster GPUs for the trainer (torchrun), or larger "
    "--micro-batch-tokens if memory allows, would make it faster.",
}


def story(run: RecordedRun) -> list[str]:
    """The sentences for which the run has data."""
    sentences = outcome(run)
    if seconds := duration(run):
        spent = f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"
        sentences.append(f"It took about {spent}. {limit_of(waits_of(times_of(run)))}".strip())
    return sentences


def outcome(run: RecordedRun) -> list[str]:
    """What was trained on what, and what came of it."""
    sentences = [_subject(run), _steps(run), *_results(run)]
    best: Any = run.progress.get("best_step")
    if isinstance(best, int):
        sentences.append(f"The best evaluation was at step {best:,}.")
    return sentences


def figure(value: float) -> str:
    """Three significant digits, without exponent from 1000 on."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _subject(run: RecordedRun) -> str:
    settings, model = run.settings, run.settings["model"]
    if settings.command == "sft":
        return f"{model or 'A model'} was fine-tuned on {settings['data.path'] or 'demonstrations'}."
    if settings.command == "reward-model":
        pairs = settings["data.path"] or settings["data.dataset"] or "pairs"
        return f"A reward model was trained from {model or 'a model'} on the pairs of {pairs}."
    source = next((settings[f"data.{name}"] for name in ("path", "dataset") if settings[f"data.{name}"]), None)
    task = f"the task {settings['task']}" + (f" ({source})" if source else "")
    rewards = settings["rewards"] or []
    named = ", ".join(map(str, rewards)) if isinstance(rewards, list) else rewards
    with_rewards = f", with the rewards {named}" if rewards else ", with the rewards of the task"
    recipe = f", by the recipe {settings['preset']}" if settings["preset"] else ""
    return f"{model or 'A model'} was trained with GRPO on {task}{with_rewards}{recipe}."


def _steps(run: RecordedRun) -> str:
    if not run.steps:
        return "No step has been trained yet."
    most = run.settings["max_steps"] if run.settings.command == "train" else None
    done = f"{run.last_step:,} of {most:,} steps" if isinstance(most, int) and most else f"{run.last_step:,} steps"
    samples = max((value for record in run.steps if (value := number(record, "completions_total")) > 0), default=0)
    lives = int(max((value for record in run.steps if (value := number(record, "epoch")) > 0), default=0))
    resumed = {0: "", 1: "; it was resumed once"}.get(lives, f"; it was resumed {lives} times")
    return f"{done} are done" + (f", on {samples:,.0f} completions" if samples else "") + resumed + "."


def _results(run: RecordedRun) -> list[str]:
    """How the evaluation metrics and the training reward or loss changed."""
    of = "pairs" if run.settings.command == "reward-model" else "problems"
    held_out = [item for item in run.evaluations if math.isfinite(number(item, "accuracy"))]
    return [
        *_change(held_out, "accuracy", f"Accuracy on held-out {of}"),
        *([] if held_out else _change(run.evaluations, "reward", "The mean reward on held-out problems")),
        *_change(run.evaluations, "eval_loss", "The loss of held-out rows"),
        *_change(run.steps, "reward", "The mean reward of the training completions"),
    ]


def _change(records: Sequence[Metrics], name: str, what: str) -> list[str]:
    known = [record for record in records if math.isfinite(number(record, name))]
    if not known:
        return []
    first, last = known[0], known[-1]
    if first is last:
        return [f"{what} is {_with_interval(first, name)}."]
    return [f"{what} went from {_with_interval(first, name)} to {_with_interval(last, name)}."]


def _with_interval(record: Metrics, name: str) -> str:
    low, high = number(record, "low"), number(record, "high")
    inside = f"95% interval {low:.2f} to {high:.2f}, " if name == "accuracy" and math.isfinite(low + high) else ""
    return f"{figure(number(record, name))} ({inside}step {record['step']})"


def times_of(run: RecordedRun) -> dict[str, dict[str, float]]:
    """Part of the run -> activity -> seconds, for parts whose times are known. Workers are summed."""
    steps = run.steps
    training, waiting = _total(steps, "training_seconds"), _total(steps, "waiting_seconds")
    rest = _rest(run)
    sampling, judging = _total(steps, "sampling_seconds"), _total(steps, "judging_seconds")
    counts = [count for record in steps if math.isfinite(count := number(record, "server_scoring_seconds"))]
    scoring = scoring_seconds(counts)
    server_waiting = max(0.0, training + waiting + rest - scoring)
    times = {
        "Policy trainer": {
            "training": training, "evaluating, publishing, checkpoints": rest, "waiting": waiting,
        },
        "Rollout workers": {
            "sampling": sampling - judging, "judging": judging, "waiting": _total(steps, "sampler_waiting_seconds"),
        },
        "Reference server": {"scoring": scoring, "waiting": server_waiting} if scoring else {},
    }  # fmt: skip
    return {part: seconds for part, seconds in times.items() if sum(seconds.values()) > 0}


def duration(run: RecordedRun) -> float:
    """Seconds that the trainer ran."""
    return _total(run.steps, "training_seconds") + _total(run.steps, "waiting_seconds") + _rest(run)


def limit_of(waits: Mapping[str, float]) -> str:
    """The bottleneck of the run in a sentence; empty with times of fewer than two parts.

    waits: part of the run -> share of its time spent waiting.
    """
    known = sorted(waits, key=lambda part: waits[part])
    if len(known) < 2:
        return ""
    first, second = known[:2]
    if waits[first] > BUSY:
        return "Every part waited: the run shared one device in turns, or had just started."
    if waits[second] - waits[first] >= CLEAR:
        return _LIMITS[first]
    return "The run was balanced: no part waited much longer than the others."


def waits_of(times: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Part -> share of its time spent waiting."""
    return {part: seconds.get("waiting", 0.0) / sum(seconds.values()) for part, seconds in times.items()}


def _rest(run: RecordedRun) -> float:
    """Seconds outside steps (evaluating, publishing, checkpoints) up to the newest checkpoint, saved in its step."""
    before = [record for record in run.steps if record["step"] < number(run.progress, "step")]
    steps = _total(before, "training_seconds") + _total(before, "waiting_seconds")
    rest = number(run.progress, "training_seconds") - steps
    return rest if before and rest > 0 else 0.0


def _total(steps: Sequence[Metrics], name: str) -> float:
    return sum(max(0.0, value) for record in steps if math.isfinite(value := number(record, name)))
