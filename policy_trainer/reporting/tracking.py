"""Trackers, which get the metrics besides metrics.jsonl: MLflow, TensorBoard, trackio, Weights & Biases.

We do not use `accelerate.tracking`: only its W&B tracker takes samples, none of them continues a resumed run, and its
TensorBoard tracker would keep the steps that such a run repeats.
"""

import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from policy_trainer.config import TrainConfig
from policy_trainer.config.marks import Travel, marked
from policy_trainer.reporting.sample_views import columns_and_rows, markdown
from policy_trainer.reporting.samples import SampledGroup
from shared.errors import UserError
from shared.settings.names import flat_settings

# The project in trackio and W&B and the experiment in MLflow, unless TRACKIO_PROJECT, WANDB_PROJECT or
# MLFLOW_EXPERIMENT_NAME names another.
_PROJECT = "tandem"
# How long a tracker rests after a failure, in durations of the call that failed.
_REST = 10
# Parameters of one request to MLflow, at most.
_MLFLOW_PARAMETERS = 100
# What MLflow refuses in names.
_NOT_IN_MLFLOW = re.compile(r"[^/\w.\- ]")
_GROUPS = {"step": "train", "evaluation": "evaluation"}


class Recorder(Protocol):
    def write(self, record: Mapping[str, Any]) -> None:
        """Takes a record of metrics.jsonl; docs/metrics.md explains every name."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """failed: the run ends with an error."""
        ...


class Tracker(Recorder, Protocol):
    """Takes metrics, and samples as a text or a table."""

    def write_samples(self, groups: Sequence[SampledGroup]) -> None: ...


class TensorBoard:
    """Writes events to RUN_DIR/tensorboard."""

    def __init__(self, config: TrainConfig, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard then hides the events that were written after the checkpoint.
        purge = first_step + 1 if first_step else 0
        self._writer = SummaryWriter(str(config.run_dir / "tensorboard"), purge_step=purge, flush_secs=10)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def write_samples(self, groups: Sequence[SampledGroup]) -> None:
        self._writer.add_text(_samples_name(groups), markdown(groups), groups[0].step)

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases. A resumed run continues its W&B run. WANDB_MODE=offline writes to RUN_DIR/wandb."""

    def __init__(self, config: TrainConfig, first_step: int) -> None:
        wandb: Any = import_module("wandb")
        id_file = config.run_dir / "wandb_id"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=config.run,
            id=id_file.read_text() if first_step and id_file.exists() else None,
            resume="allow",
            dir=config.run_dir,
            config=_settings(config),
            settings=wandb.Settings(console="off"),  # W&B would capture the panel's output
        )
        self._table: Any = wandb.Table
        id_file.write_text(self._run.id)
        # W&B's own step only grows, but a resumed run writes some steps again.
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        if values := scalars(record):
            self._run.log({**values, "step": record["step"]})

    def write_samples(self, groups: Sequence[SampledGroup]) -> None:
        columns, data = columns_and_rows(groups)
        self._run.log({_samples_name(groups): self._table(columns=columns, data=data), "step": groups[0].step})

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """trackio. It keeps runs on this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set."""

    def __init__(self, config: TrainConfig, first_step: int) -> None:
        trackio: Any = import_module("trackio")
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
            name=config.run,
            config=_settings(config),
            resume="allow" if first_step else "never",
            embed=False,
        )
        self._table: Any = trackio.Table

    def write(self, record: Mapping[str, Any]) -> None:
        if values := scalars(record):
            self._run.log(values, step=record["step"])

    def write_samples(self, groups: Sequence[SampledGroup]) -> None:
        columns, data = columns_and_rows(groups)
        frame = import_module("pandas").DataFrame(data, columns=columns)  # trackio itself needs pandas
        self._run.log({_samples_name(groups): self._table(dataframe=frame)}, step=groups[0].step)

    def close(self, *, failed: bool = False) -> None:
        self._run.finish()


class MLflow:
    """MLflow, where MLFLOW_TRACKING_URI says or where it keeps runs by default. A resumed run continues its run."""

    def __init__(self, config: TrainConfig, first_step: int) -> None:
        mlflow: Any = import_module("mlflow")
        self._entities: Any = mlflow.entities
        self._client = mlflow.MlflowClient()
        id_file = config.run_dir / "mlflow_id"
        if first_step and id_file.exists():
            self._run = id_file.read_text()
            self._client.update_run(self._run, "RUNNING")
            return
        experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT))
        self._run = self._client.create_run(experiment.experiment_id, run_name=config.run).info.run_id
        id_file.write_text(self._run)
        settings = flat_settings(_settings(config))
        parameters = [self._entities.Param(_in_mlflow(name), str(value)) for name, value in settings.items()]
        for start in range(0, len(parameters), _MLFLOW_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[start : start + _MLFLOW_PARAMETERS])

    def write(self, record: Mapping[str, Any]) -> None:
        now = int(time.time() * 1000)
        values = scalars(record).items()
        metrics = [self._entities.Metric(_in_mlflow(name), value, now, record["step"]) for name, value in values]
        self._client.log_batch(self._run, metrics=metrics)

    def write_samples(self, groups: Sequence[SampledGroup]) -> None:
        self._client.log_text(self._run, markdown(groups), f"{_samples_name(groups)}-{groups[0].step}.md")

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


# By their names in `report_to`, which are also the names of the packages. A tracker is made from the settings and the
# step that the run resumes from.
TRACKERS: Mapping[str, Callable[[TrainConfig, int], Tracker]] = {
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": Wandb,
}


class SafeTracker:
    """A tracker whose failures do not end training. The first failure is reported. After each it rests for ten times as
    long as the failed call took: a library may try for minutes to reach its server."""

    def __init__(self, name: str, tracker: Tracker, note: Callable[[str], None]) -> None:
        self._name = name
        self._tracker = tracker
        self._note = note
        self._failed = False
        self._rests_until = 0.0

    def write(self, record: Mapping[str, Any]) -> None:
        self._try(lambda: self._tracker.write(record))

    def write_samples(self, groups: Sequence[SampledGroup]) -> None:
        self._try(lambda: self._tracker.write_samples(groups))

    def close(self, *, failed: bool = False) -> None:
        self._try(lambda: self._tracker.close(failed=failed))

    def _try(self, work: Callable[[], None]) -> None:
        if (began := time.monotonic()) < self._rests_until:
            return
        try:
            work()
        except Exception as error:  # a library or network failed; RUN_DIR has every record
            self._rests_until = time.monotonic() + _REST * (time.monotonic() - began)
            if not self._failed:
                self._note(f"{self._name} failed; the run continues without it: {error}")
            self._failed = True


class Trackers:
    """Forwards each record to several trackers."""

    def __init__(self, trackers: Sequence[Recorder]) -> None:
        self._trackers = trackers

    def write(self, record: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.write(record)

    def close(self, *, failed: bool = False) -> None:
        for tracker in self._trackers:
            tracker.close(failed=failed)


def refuse_missing(names: Sequence[str]) -> None:
    """Raises UserError for a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"report_to: {name} is not installed", f"pip install {name}")


def start_trackers(config: TrainConfig, first_step: int, note: Callable[[str], None]) -> list[Tracker]:
    """The trackers in `report_to`. Once started, a tracker that fails does not end the run.

    Raises UserError when a new run cannot start one; a resumed run continues without it.
    """
    started: list[Tracker] = []
    for name in dict.fromkeys(config.report_to):
        try:
            started.append(SafeTracker(name, TRACKERS[name](config, first_step), note))
        except Exception as error:
            if not first_step:
                for tracker in started:
                    tracker.close()
                raise UserError(f"report_to: {name} cannot start: {error}") from error
            note(f"{name} cannot start; the run continues without it: {error}")
    return started


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Without secrets."""
    private = marked(type(config), Travel.PRIVATE)
    return config.model_dump(mode="json", exclude=private, exclude_none=True)


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step or an evaluation, by names such as `train/kl` and `evaluation/rewards/tags`."""
    group = _GROUPS.get(record["kind"])
    return {} if group is None else _flat(group, {name: v for name, v in record.items() if name != "step"})


def _in_mlflow(name: str) -> str:
    return _NOT_IN_MLFLOW.sub("_", name)


def _samples_name(groups: Sequence[SampledGroup]) -> str:
    return f"samples/{groups[0].kind}"


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            numbers |= _flat(f"{prefix}/{name}", value)
        elif isinstance(value, int | float) and math.isfinite(value):
            numbers[f"{prefix}/{name}"] = float(value)
    return numbers
