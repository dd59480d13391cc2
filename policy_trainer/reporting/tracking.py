"""Where metrics go besides metrics.jsonl: TensorBoard, trackio, Weights & Biases."""

import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from policy_trainer.config import TrainConfig
from shared.errors import UserError

# Of a run in trackio and W&B, unless the environment has TRACKIO_PROJECT or WANDB_PROJECT.
_PROJECT = "tandem"
# What nobody else needs to know: addresses, keys, and what is no property of the run.
_PRIVATE = {"config", "resume", "server", "token_file", "tls_ca"}
_GROUPS = {"step": "train", "evaluation": "evaluation"}


class Tracker(Protocol):
    def write(self, record: Mapping[str, Any]) -> None:
        """A step, an evaluation or a warning; docs/metrics.md has every name."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TrackedRun:
    """first_step: the step that this life of the run goes on from. settings: without secrets."""

    name: str
    directory: Path
    first_step: int
    settings: Mapping[str, Any]


class TensorBoard:
    """Events in RUN_DIR/tensorboard."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard forgets what an abandoned lineage wrote from that step on.
        purge = run.first_step + 1 if run.first_step else 0
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=purge, flush_secs=10)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases, one run over all lives. WANDB_MODE=offline keeps it in RUN_DIR/wandb, for `wandb sync`."""

    def __init__(self, run: TrackedRun) -> None:
        wandb: Any = import_module("wandb")
        known = run.directory / "wandb_id"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=run.name,
            id=known.read_text() if run.first_step and known.exists() else None,
            resume="allow",
            dir=run.directory,
            config=dict(run.settings),
            settings=wandb.Settings(console="off"),  # the terminal is ours
        )
        known.write_text(self._run.id)
        # W&B's own count only grows, and a resumed run writes some steps again.
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        if values := scalars(record):
            self._run.log({**values, "step": record["step"]})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """trackio, which keeps runs on this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say otherwise."""

    def __init__(self, run: TrackedRun) -> None:
        trackio: Any = import_module("trackio")
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
            name=run.name,
            config=dict(run.settings),
            resume="allow" if run.first_step else "never",
            embed=False,
        )

    def write(self, record: Mapping[str, Any]) -> None:
        if values := scalars(record):
            self._run.log(values, step=record["step"])

    def close(self) -> None:
        self._run.finish()


# By the name in `track`, which is that of the package too.
TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": Wandb,
}


class Harmless:
    """A tracker whose failures end no training: the first is told, all are passed over."""

    def __init__(self, name: str, tracker: Tracker, note: Callable[[str], None]) -> None:
        self._name = name
        self._tracker = tracker
        self._note = note
        self._failed = False

    def write(self, record: Mapping[str, Any]) -> None:
        self._try(lambda: self._tracker.write(record))

    def close(self) -> None:
        self._try(self._tracker.close)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # of somebody else's library and network: metrics.jsonl has every record
            if not self._failed:
                self._note(f"{self._name} fails, the run goes on without it: {error}")
            self._failed = True


class Trackers:
    """Several as one, told in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def write(self, record: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.write(record)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def refuse_missing(names: Sequence[str]) -> None:
    """Raises UserError for a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"track: {name} is not installed: pip install {name}")


def start_trackers(config: TrainConfig, first_step: int, note: Callable[[str], None]) -> list[Tracker]:
    """Those of `track`, each of which may fail without harm once it has started.

    Raises UserError for one that a new run cannot start; a run that goes on goes on without it.
    """
    settings = config.model_dump(mode="json", exclude=_PRIVATE, exclude_none=True)
    run = TrackedRun(config.run, config.run_dir, first_step, settings)
    started: list[Tracker] = []
    for name in dict.fromkeys(config.report_to):
        try:
            started.append(Harmless(name, TRACKERS[name](run), note))
        except Exception as error:
            if not first_step:
                raise UserError(f"track: {name} cannot start: {error}") from error
            note(f"{name} cannot start, the run goes on without it: {error}")
    return started


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step or an evaluation by name, as `train/kl` and `evaluation/rewards/tags`."""
    group = _GROUPS.get(record["kind"])
    return {} if group is None else _flat(group, {name: v for name, v in record.items() if name != "step"})


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(f"{prefix}/{name}", value)
        elif isinstance(value, int | float) and math.isfinite(value):
            found[f"{prefix}/{name}"] = float(value)
    return found
