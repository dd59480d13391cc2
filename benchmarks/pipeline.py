"""Predicts how busy workers, scorers and trainer are, from measured stage times: who waits for whom.

    python -m benchmarks.pipeline --run runs/mine     from a run's stage times, compared with the run's own time
    python -m benchmarks.pipeline --sample 12 --score 0.6 --train 9 --groups 32     from times of your own

A run is a queue network: workers sample rounds of groups while fewer than `max_waiting` wait, scorers take groups in
their order, the trainer takes a step's groups, trains, and publishes. The simulation is of events, not of formulas,
since workers that pause and weights that grow old couple the stages. Times are means; nothing is random.
"""

import argparse
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import simpy

from benchmarks.measure import show
from policy_trainer.reporting.metrics import read_metrics
from shared.settings.files import read_toml

_WARM_UP = 10  # steps that are not counted: the pipeline fills, caches are cold
_STEPS = 200

_Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True)
class Stages:
    """Times in seconds. sample: of a worker for a group, rewards included. load: of a worker for a new version.

    score: of a scorer for a group. train: of the trainer for a step. publish: until workers see a version. groups: of a
    step. ahead: groups that the trainer leases in advance.
    """

    sample: float
    score: float
    train: float
    groups: int
    load: float = 0.0
    publish: float = 0.0
    publish_every: int = 1
    prompts_per_round: int = 8
    max_waiting: int = 0
    ahead: int = 0


@dataclass(frozen=True)
class Prediction:
    """Of each stage the share of its time that it works. staleness: mean age of the trained groups, in steps."""

    seconds_per_step: float
    workers: float
    scorers: float
    trainer: float
    staleness: float


class _Run:
    """One simulated run. Versions stand for groups: a group is known by that of the weights that sampled it."""

    def __init__(self, stages: Stages, workers: int, scorers: int) -> None:
        self.stages, self.env = stages, simpy.Environment()
        self.queued, self.ready = simpy.Store(self.env), simpy.Store(self.env)
        self.leased = simpy.Store(self.env, capacity=max(1, stages.ahead or stages.groups))
        self.scoring = 0
        self.version, self.step, self.warm = 0, 0, 0.0
        self.busy: dict[str, float] = dict.fromkeys(("worker", "scorer", "trainer"), 0.0)
        self.ages: list[int] = []
        for _ in range(workers):
            self.env.process(self._work())
        for _ in range(scorers):
            self.env.process(self._score())
        self.env.process(self._lease())

    def _spend(self, who: str, seconds: float) -> simpy.Timeout:
        if self.step >= _WARM_UP:
            self.busy[who] += seconds
        return self.env.timeout(seconds)

    def _work(self) -> _Process:
        loaded, bound = -1, self.stages.max_waiting or 3 * self.stages.groups
        while True:
            while len(self.queued.items) + self.scoring + len(self.ready.items) >= bound:
                yield self.env.timeout(0.1)  # as often as workers look
            if loaded != self.version:
                loaded = self.version
                yield self.env.timeout(self.stages.load)
            yield self._spend("worker", self.stages.sample * self.stages.prompts_per_round)
            for _ in range(self.stages.prompts_per_round):
                yield self.queued.put(loaded)

    def _score(self) -> _Process:
        while True:
            group = yield self.queued.get()
            self.scoring += 1
            yield self._spend("scorer", self.stages.score)
            self.scoring -= 1
            yield self.ready.put(group)

    def _lease(self) -> _Process:
        while True:
            yield self.leased.put((yield self.ready.get()))

    def train(self, steps: int) -> _Process:
        while self.step < steps + _WARM_UP:
            if self.step == _WARM_UP:
                self.warm = self.env.now
            for _ in range(self.stages.groups):
                group = yield self.leased.get()
                if self.step >= _WARM_UP:
                    self.ages.append(self.step - group)
            yield self._spend("trainer", self.stages.train)
            self.step += 1
            if self.step % self.stages.publish_every == 0:
                self.env.process(self._publish(self.step))

    def _publish(self, version: int) -> _Process:
        yield self.env.timeout(self.stages.publish)
        self.version = max(self.version, version)


def predict(stages: Stages, *, workers: int, scorers: int, trainers: int, steps: int = _STEPS) -> Prediction:
    """trainers: devices that share each step evenly."""
    run = _Run(replace(stages, train=stages.train / trainers), workers, scorers)
    run.env.run(until=run.env.process(run.train(steps)))
    seconds = run.env.now - run.warm
    return Prediction(
        seconds_per_step=seconds / steps,
        workers=run.busy["worker"] / seconds / workers,
        scorers=run.busy["scorer"] / seconds / scorers,
        trainer=run.busy["trainer"] / seconds,
        staleness=sum(run.ages) / len(run.ages),
    )


def measured(run_dir: Path) -> tuple[Stages, Prediction]:
    """A run's mean stage times, and what they came to: workers and scorers as if there had been one of each."""
    records = [record for record in read_metrics(run_dir / "metrics.jsonl") if record["kind"] == "step"][_WARM_UP:]
    if len(records) < _WARM_UP:
        raise SystemExit(f"{run_dir} has too few steps: at least {2 * _WARM_UP} are needed")
    config = read_toml(run_dir / "config.toml")
    sampling, steps = config.get("sampling", {}), len(records)
    groups = sum(len(record["batch_ids"]) for record in records) / steps
    total = {name: sum(record[name] for record in records) for name in (
        "sampling_seconds", "training_seconds", "waiting_seconds", "staleness",
    )}  # fmt: skip
    scored = records[-1]["server_scoring_seconds"] - records[0]["server_scoring_seconds"]
    seconds = total["training_seconds"] + total["waiting_seconds"]
    stages = Stages(
        sample=total["sampling_seconds"] / steps / groups,
        score=scored / (steps - 1) / groups,
        train=total["training_seconds"] / steps,
        groups=round(groups),
        publish_every=config.get("publish_every", 1),
        prompts_per_round=sampling.get("prompts_per_round", 8),
        max_waiting=config.get("max_waiting") or 0,
    )
    came_to = Prediction(
        seconds / steps, total["sampling_seconds"] / seconds, scored / seconds, total["training_seconds"] / seconds,
        total["staleness"] / steps,
    )  # fmt: skip
    return stages, came_to


def _show(title: str, rows: Sequence[tuple[str, Prediction]]) -> None:
    busy = [f"{stage} busy" for stage in ("workers", "scorers", "trainer")]
    cells = []
    for name, row in rows:
        shares = [f"{share:.0%}" for share in (row.workers, row.scorers, row.trainer)]
        cells.append([name, f"{row.seconds_per_step:.3g}", *shares, f"{row.staleness:.1f}"])
    show(title, ["workers / scorers / trainers", "s a step", *busy, "staleness, steps"], cells)


def _sizes(stages: Stages) -> list[tuple[str, Prediction]]:
    rows = []
    for workers, scorers, trainers in ((1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (8, 2, 1), (8, 2, 2), (16, 2, 2)):
        name = f"{workers} / {scorers} / {trainers}"
        rows.append((name, predict(stages, workers=workers, scorers=scorers, trainers=trainers)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="directory of a run with one worker and one server")
    for name in ("sample", "score", "train", "load", "publish"):
        parser.add_argument(f"--{name}", type=float, default=0.0, help="seconds; see Stages")
    for name, default in (("groups", 16), ("publish-every", 1), ("prompts-per-round", 8), ("max-waiting", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args())
    run = given.pop("run")
    if run is None:
        stages = Stages(**given)
    else:
        stages, came_to = measured(run)
        predicted = predict(stages, workers=1, scorers=1, trainers=1)
        _show(f"{run}, after {_WARM_UP} steps", [("measured", came_to), ("predicted", predicted)])
        print(f"predicted / measured: {predicted.seconds_per_step / came_to.seconds_per_step:.2f} of the time a step")
    _show(str(stages), _sizes(stages))


if __name__ == "__main__":
    main()
