"""`GRPO(model=…, dataset=…, rewards=[f], **settings).train()`: a run like that of `policy-trainer train`."""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from policy_trainer.cli.settings import HINTS
from policy_trainer.config import ENV_PREFIX, TrainConfig
from policy_trainer.door.function_server import FunctionServer
from policy_trainer.door.own_data import OwnData, Problems, own_data
from policy_trainer.door.own_functions import own_rewards
from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.presets import SETTINGS
from policy_trainer.reporting.metrics import Metrics, read_metrics
from policy_trainer.rewards.callers import ADDRESS_VARIABLE
from policy_trainer.run_files.checkpoint import Checkpoints
from policy_trainer.run_files.run_directory import RunDirectory
from shared.client import ClientError
from shared.client.credentials import remedy
from shared.devices import describe_device
from shared.errors import UserError
from shared.settings import from_python

_HINTS = replace(HINTS, listed="`policy-trainer train --help-all` lists all")
# A run changes the environment that children inherit, so there can be one at a time.
_ONE_RUN = threading.Lock()


@dataclass(frozen=True)
class GRPOResult:
    """How a run ended.

    finished: False if it was interrupted. steps: those done, in all processes of the run. model: directory of the
    trained model, or of the newest checkpoint of an interrupted run; both load as Hugging Face models. None if there is
    none. best_model: the checkpoint of the best evaluation, None if that was the one before training. history:
    metrics of each step. evaluations: those of each evaluation.
    """

    finished: bool
    steps: int
    run_dir: Path
    model: str | None = None
    best_model: str | None = None
    history: list[Metrics] = field(default_factory=list, repr=False)
    evaluations: list[Metrics] = field(default_factory=list, repr=False)


class GRPO:
    """A training run. It starts a reference server and a rollout worker beside this process, and ends them.

    dataset: a datasets.Dataset, a list of dicts, a file, or the name of a Hugging Face dataset; its columns are
    `prompt` (a text, or messages), and whatever rewards use. eval_dataset: held-out problems; by default every tenth
    of the dataset. rewards: functions as TRL calls them, `f(prompts, completions, **columns)`, or of one `completion`,
    and names. settings: those of `policy-trainer train`, groups as dicts: `loss={"beta": 0.02}`.

    Raises UserError, with the setting's name, for what cannot be used.

    ```
    result = GRPO(model="Qwen/Qwen2.5-0.5B-Instruct", dataset=problems, rewards=[concise], max_steps=100).train()
    ```
    """

    def __init__(
        self,
        *,
        model: str | Path,
        dataset: Problems | None = None,
        eval_dataset: Problems | None = None,
        rewards: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] = (),
        **settings: Any,
    ) -> None:
        if not isinstance(model, str | Path):
            raise UserError(
                f"model: must be a directory or a Hub id, got {type(model).__name__}; save_pretrained model and "
                "tokenizer to a directory first: other processes load it, too"
            )
        directory = Path(settings.get("run_dir", TrainConfig.model_fields["run_dir"].default)) / "data"
        self._data: list[OwnData] = []
        if dataset is not None:
            settings = self._with_data(settings, own_data(dataset, directory, "dataset"), "")
        if eval_dataset is not None:
            settings = self._with_data(settings, own_data(eval_dataset, directory, "eval_dataset"), "eval_")
        own = own_rewards(rewards)
        self._functions = own.here
        chosen = {"rewards": own.names} if own.names else {}
        values = {**settings, "model": str(model), **chosen}
        self.config = from_python(TrainConfig, values, presets=SETTINGS, hints=_HINTS)

    def train(self) -> GRPOResult:
        """Trains to the last step. Ctrl-C, or a notebook's interrupt, stops between steps with a checkpoint; a second
        stops at once. With `resume=True` the same call goes on.

        Raises UserError for what cannot be used, RunFailed for a run that cannot go on.
        """
        from policy_trainer.trainer.dry_run import dry_run  # late, as in the commands: wrong settings fail at once
        from policy_trainer.trainer.run import train

        console = _console()
        directory = RunDirectory(self.config.run_dir)
        if directory.holds_a_run() and not (self.config.resume or self.config.dry_run):
            raise UserError(
                f"run_dir: {directory.root} holds a run already; give resume=True to continue it, or another run_dir"
            )
        with _only_run(), ExitStack() as stack:
            console.print(f"device: {describe_device(self.config.device)}", highlight=False)
            for data in self._data:
                data.write()
            stack.enter_context(_told(self.config))
            stack.enter_context(_environment(self._environment(stack)))
            outcome = (dry_run if self.config.dry_run else train)(self.config, console)
        if self.config.dry_run:  # it has left nothing
            return GRPOResult(outcome.finished, outcome.steps, directory.root)
        result = _result(outcome.finished, outcome.steps, directory, self.config, outcome.best_step)
        console.print(_last_words(result), highlight=False, soft_wrap=True)
        return result

    def _with_data(self, settings: Mapping[str, Any], data: OwnData, prefix: str) -> dict[str, Any]:
        """The settings with the place of these problems. Raises UserError if they name another."""
        self._data.append(data)
        given = dict(settings.get("data", {}))
        place = {f"{prefix}{name}": value for name, value in data.settings.items()}
        if prefix and "path" not in data.settings:
            raise UserError("eval_dataset: must be rows or a file; a split of a Hub dataset is data={'eval_split': …}")
        if clash := [name for name in place if name in given]:
            raise UserError(f"data.{clash[0]}: leave it out, or leave out {prefix}dataset: each names the problems")
        task = {} if prefix else {"task": data.task}
        return {**task, **settings, "data": {**given, **place}}

    def _environment(self, stack: ExitStack) -> dict[str, str]:
        """What the run's processes find in their environment: this process's modules, and the way to its functions."""
        modules = {"PYTHONPATH": os.pathsep.join(sys.path)}
        if not self._functions:
            return modules
        server = stack.enter_context(FunctionServer(self._functions))
        return {**modules, ADDRESS_VARIABLE: str(server.address)}


def _console() -> Console:
    """In a notebook plain lines on standard output: standard error is red, and a live table would be printed anew each
    time. Else as the command."""
    if Console().is_jupyter:
        return Console(force_jupyter=False, force_terminal=False)
    return Console(stderr=True)


@contextmanager
def _only_run() -> Iterator[None]:
    if not _ONE_RUN.acquire(blocking=False):
        raise UserError("this process trains already: wait for its run, or start another process")
    try:
        yield
    finally:
        _ONE_RUN.release()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _told(config: TrainConfig) -> Iterator[None]:
    """Turns errors of a server that the user has named into RunFailed, with the command's words."""
    try:
        yield
    except ClientError as error:
        raise RunFailed(f"{error}{remedy(error, ENV_PREFIX)}") from error


def _result(finished: bool, steps: int, directory: RunDirectory, config: TrainConfig, best: int | None) -> GRPOResult:
    checkpoints = Checkpoints(directory.checkpoints, keep=config.checkpoint.save_total_limit)
    model = directory.model if finished else checkpoints.newest()
    records = read_metrics(directory.metrics)
    return GRPOResult(
        finished=finished,
        steps=steps,
        run_dir=directory.root,
        model=str(model) if model else None,
        best_model=str(path) if best and (path := checkpoints.of_step(best)) else None,
        history=_of_kind("step", records),
        evaluations=_of_kind("evaluation", records),
    )


def _of_kind(kind: str, records: Sequence[Metrics]) -> list[Metrics]:
    return [record for record in records if record["kind"] == kind]


def _last_words(result: GRPOResult) -> str:
    if result.finished:
        return f"{result.steps} steps; the model is in {result.model}"
    return f"stopped after {result.steps} steps; the same call with resume=True goes on"
