"""A run in a few sentences."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from policy_trainer.report.ledger import duration, limit_of, parts_of
from policy_trainer.report.recorded import RecordedRun, number
from policy_trainer.reporting.metrics import Metrics


def story(run: RecordedRun) -> list[str]:
    """One sentence each, those that are known."""
    sentences = [_SUBJECTS[run.settings.command](run), _steps(run), *_results(run), _best(run), _time(run)]
    return [sentence for sentence in sentences if sentence]


def figure(value: float) -> str:
    """Three digits, and no exponent where people do not expect one."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _trained(run: RecordedRun) -> str:
    known = run.settings
    source = next((known[f"data.{name}"] for name in ("path", "dataset") if known[f"data.{name}"]), None)
    task = f"the task {known['task']}" + (f" ({source})" if source else "")
    rewards = known["rewards"] or []
    with_rewards = f", with the rewards {', '.join(map(str, rewards))}" if rewards else ", with the rewards of the task"
    recipe = f", by the recipe {known['preset']}" if known["preset"] else ""
    return f"{known['model'] or 'A model'} was trained with GRPO on {task}{with_rewards}{recipe}."


def _tuned(run: RecordedRun) -> str:
    return f"{run.settings['model'] or 'A model'} was fine-tuned on {run.settings['data.path'] or 'demonstrations'}."


def _judged(run: RecordedRun) -> str:
    source = run.settings["data.path"] or run.settings["data.dataset"] or "pairs"
    return f"A reward model was trained from {run.settings['model'] or 'a model'} on the pairs of {source}."


_SUBJECTS: Mapping[str, Callable[[RecordedRun], str]] = {"train": _trained, "sft": _tuned, "reward-model": _judged}


def _steps(run: RecordedRun) -> str:
    if not run.steps:
        return "It has not trained a step yet."
    most = run.settings["max_steps"] if run.settings.command == "train" else None
    done = f"{run.last_step:,} of {most:,} steps" if isinstance(most, int) and most else f"{run.last_step:,} steps"
    samples = run.samples_at().get(run.last_step)
    lives = int(max((value for record in run.steps if (value := number(record, "epoch")) > 0), default=0))
    resumed = {0: "", 1: "; it was resumed once"}.get(lives, f"; it was resumed {lives} times")
    return f"{done} are done" + (f", on {samples:,.0f} completions" if samples else "") + resumed + "."


def _results(run: RecordedRun) -> list[str]:
    """How the figures of its evaluations, and the reward or the loss of its steps, have changed."""
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


def _best(run: RecordedRun) -> str:
    best: Any = run.progress.get("best_step")
    return f"The best evaluation is that of step {best:,}." if isinstance(best, int) else ""


def _time(run: RecordedRun) -> str:
    seconds = duration(run)
    if not seconds:
        return ""
    spent = f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"
    return f"It took about {spent}. {limit_of(parts_of(run))}".strip()
