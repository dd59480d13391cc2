"""Where the time of a run went, as far as its metrics tell, and which part limited it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policy_trainer.report.recorded import RecordedRun, number
from policy_trainer.reporting.metrics import Metrics, scoring_seconds

# The part that limits a run hardly waits, and the others clearly more; as the dashboard judges.
_BUSY, _CLEAR = 0.3, 0.15
_LIMITS: Mapping[str, str] = {
    "Rollout workers": "Sampling limited this run: more workers (policy-trainer rollout, --devices), or "
    "--sampler vllm, would make it faster.",
    "Reference server": "Scoring limited this run: more GPUs for the server (ref-server serve --devices "
    "cuda:0 cuda:1), or --dtype bfloat16, would make it faster.",
    "Policy trainer": "Training limited this run: more or faster GPUs for the trainer (torchrun), or larger "
    "--micro-batch-tokens if memory allows, would make it faster.",
}


@dataclass(frozen=True)
class Share:
    """What a part did, for how many seconds, and their share of all that is known of the part."""

    doing: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Part:
    """A process, or several of a kind. waits: the share of its time that it waited."""

    name: str
    shares: tuple[Share, ...]
    waits: float


def parts_of(run: RecordedRun) -> list[Part]:
    """The parts whose times are known. Seconds of several workers are added up."""
    steps = run.steps
    training, waiting = _total(steps, "training_seconds"), _total(steps, "waiting_seconds")
    rest = _rest(run)
    sampling, judging = _total(steps, "sampling_seconds"), _total(steps, "judging_seconds")
    counts = [count for record in steps if math.isfinite(count := number(record, "server_scoring_seconds"))]
    scoring = scoring_seconds(counts)
    whole = training + waiting + rest
    held = {"training": training, "evaluating, publishing, checkpoints": rest, "waiting": waiting}
    sampled = {"sampling": sampling - judging, "judging": judging}
    found = {
        "Policy trainer": held,
        "Rollout workers": {**sampled, "waiting": _total(steps, "sampler_waiting_seconds")},
        "Reference server": {"scoring": scoring, "waiting": max(0.0, whole - scoring)} if scoring else {},
    }
    return [_part(name, seconds) for name, seconds in found.items() if sum(seconds.values()) > 0]


def duration(run: RecordedRun) -> float:
    """Seconds of the trainer."""
    return _total(run.steps, "training_seconds") + _total(run.steps, "waiting_seconds") + _rest(run)


def limit_of(parts: Sequence[Part]) -> str:
    """What limited the run, in a sentence; empty where too little is known."""
    known = sorted(parts, key=lambda part: part.waits)
    if len(known) < 2:
        return ""
    first, second = known[:2]
    if first.waits > _BUSY:
        return "Every part waited: the run took turns on one device, or has only just begun."
    if second.waits - first.waits >= _CLEAR:
        return _LIMITS[first.name]
    return "The parts kept each other busy: none of them waited much longer than the others."


def _part(name: str, seconds: Mapping[str, float]) -> Part:
    total = sum(seconds.values())
    shares = tuple(Share(doing, spent, spent / total) for doing, spent in seconds.items() if spent > 0)
    return Part(name, shares, seconds.get("waiting", 0.0) / total)


def _rest(run: RecordedRun) -> float:
    """What the newest checkpoint's training loop did beside its steps. It was saved within its last step's turn."""
    before = [record for record in run.steps if record["step"] < number(run.progress, "step")]
    steps = _total(before, "training_seconds") + _total(before, "waiting_seconds")
    rest = number(run.progress, "training_seconds") - steps
    return rest if before and rest > 0 else 0.0


def _total(steps: Sequence[Metrics], name: str) -> float:
    return sum(max(0.0, value) for record in steps if math.isfinite(value := number(record, name)))
