"""`GRPO(model=…, dataset=…, rewards=[f], **settings).train()`: a run like that of `policy-trainer train`."""

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from policy_trainer.cli.status import tell_device
from policy_trainer.config import ENV_PREFIX, TrainConfig
from policy_trainer.config.functions import CALLER
from policy_trainer.config.names import HINTS
from policy_trainer.config.presets import SETTINGS
from policy_trainer.processes.fork_server import fork_server
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.python_api.callbacks import Callbacks, StepFunction, callback_input, step_input
from policy_trainer.python_api.inputs import (
    Problems,
    data_directory,
    loss_input,
    placed,
    problem_input,
    reward_input,
    turns_input,
    with_data,
)
from policy_trainer.reporting.metrics import Metrics, read_metrics
from policy_trainer.rewards.failures import RewardsFailed
from policy_trainer.rewards.function_server import ADDRESS_VARIABLE, FunctionServer
from policy_trainer.rollout.environments.host import session_here
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.observer import Observer
from shared.client import ClientError
from shared.client.credentials import remedy
from shared.errors import UserError
from shared.process import quick_imports
from shared.settings import from_python
from shared.spelling import spelled_in_python

if TYPE_CHECKING:
    from policy_trainer.python_api.callbacks import AnyCallback
    from policy_trainer.trainer.evaluation.results import Evaluation
    from policy_trainer.trainer.run import TrainResult

_HINTS = replace(HINTS, listed="`policy-trainer train --help-all` lists all")
_spelled = spelled_in_python({"data.path": "dataset", "data.eval_path": "eval_dataset"})
# A run changes the environment that children inherit, so there can be one at a time.
_ONE_RUN = threading.Lock()


class GRPO:
    """A training run. It starts a reference server and a rollout worker as further processes, and ends them.

    dataset: a datasets.Dataset, a list of dicts, a file, or the name of a Hugging Face dataset; its columns are
    `prompt` (a text, or messages), and whatever rewards use. eval_dataset: held-out problems; by default every tenth
    of the dataset. rewards: functions as TRL calls them, `f(prompts, completions, **columns)`, or of one `completion`,
    and names. tools: functions that the model may call, with type hints and docstrings. environment_factory: a class,
    or classes by name, whose methods the model may call, as in TRL. on_step: called after each step as `f(metrics)` or
    `f(metrics, groups)`, the groups with texts, rewards and advantages; returning False, or raising StopTraining, ends
    the run with a checkpoint. callbacks: of transformers' Trainer, which are called at the events that a run has.
    settings: those of `policy-trainer train`, groups as dicts: `loss={"beta": 0.02}`; there `surrogate` and
    `advantage` may be functions (docs/pieces.md).

    Raises UserError, with the setting's name, for what cannot be used.

    ```
    result = GRPO(model="Qwen/Qwen2.5-0.5B-Instruct", dataset=problems, rewards=[concise], max_steps=100).train()
    ```
    """

    @_spelled
    def __init__(
        self,
        *,
        model: str | Path | None = None,
        dataset: Problems | None = None,
        eval_dataset: Problems | None = None,
        rewards: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] = (),
        tools: Iterable[str | Callable[..., Any]] = (),
        environment_factory: str | Callable[..., Any] | Mapping[str, str | Callable[..., Any]] | None = None,
        on_step: Callable[..., object] | None = None,
        callbacks: "Iterable[AnyCallback]" = (),
        **settings: Any,
    ) -> None:
        if model is not None and not isinstance(model, str | Path):
            raise UserError(
                f"model: must be a directory or a Hub id, got {type(model).__name__}",
                "save_pretrained model and tokenizer to a directory first: other processes load it, too",
            )
        given = {"": dataset, "eval_": eval_dataset}
        self._data = {
            kind: problem_input(problems, f"{kind}dataset") for kind, problems in given.items() if problems is not None
        }
        names, functions = reward_input(rewards)
        turns, toolbox = turns_input(tools, environment_factory)
        if "environment" in turns and "environment" in settings:
            raise UserError("environment_factory: leave it out, or leave out the setting environment")
        self.observer = _observer(on_step, callbacks)
        served = toolbox.tools or toolbox.environments
        self._functions = FunctionServer(functions, partial(session_here, toolbox) if served else None)
        values = {
            **loss_input(with_data(settings, self._data)),
            **({} if model is None else {"model": str(model)}),
            **({"rewards": names} if names else {}),
            **turns,
        }
        config = from_python(TrainConfig, values, presets=SETTINGS, hints=_HINTS)
        # Absolute, since the caller's functions run in this process and may change its working directory.
        config = config.model_copy(update={"run_dir": config.run_dir.absolute()})
        self.config = placed(config, self._data)

    @_spelled
    def train(self) -> "GRPOResult":
        """Trains to the last step. Ctrl-C, or a notebook's interrupt, stops between steps with a checkpoint; a second
        stops at once. With `resume=True` the same call goes on.

        Raises UserError for what cannot be used, RunFailed for a run that cannot go on.
        """
        console = _console()
        if not self.config.resume:  # before its data is written there
            RunDirectory(self.config.run_dir).refuse_trained()
        with self._run_environment(), fork_server(self.config) as forks:
            with quick_imports():
                from policy_trainer.trainer.run import train  # late: it loads PyTorch

            tell_device(self.config.device, console)
            outcome = train(self.config, console, self.observer, forks=forks)
        result = _result(self.config, outcome)
        console.print(str(result), highlight=False, soft_wrap=True)
        return result

    @_spelled
    def check(self) -> bool:
        """Checks all that the run needs, up to one full step of one group, and prints what it finds: the command
        `doctor`. It trains nothing and keeps only the data that the run will use. True if the run may begin.
        """
        from policy_trainer.trainer.doctor.examination import examine
        from policy_trainer.trainer.doctor.findings import Subject, Verdict, conclusion, print_findings

        console = _console()
        with self._run_environment() as stack:
            subject = Subject(self.config, stack, lambda text: None)
            findings = list(print_findings(examine(subject), console))
        console.print(conclusion(findings))
        return not any(finding.verdict is Verdict.WRONG for _, finding in findings)

    @_spelled
    def evaluate(self, model: str | Path | None = None) -> "Evaluation":
        """Measures a model on the held-out problems with the run's rewards, as evaluations while training do; on all of
        them if evaluation.problems is 0. model: such as a result's; None: the one that the run begins with.

        Raises UserError for what cannot be used, RunFailed for a reward that failed on every answer.
        """
        other = {} if model is None else {"model": str(model), "revision": None}
        config = self.config.model_copy(update={**other, "sampler": "hf"})
        with self._run_environment():
            from policy_trainer.trainer.evaluation.evaluator import evaluation_params  # late: they load PyTorch
            from policy_trainer.trainer.evaluation.standalone import evaluate_model

            (evaluation,) = evaluate_model(config, lambda *_: None, {"": evaluation_params(config)})
            for name, error in evaluation.failed.items():
                raise RewardsFailed(name, "every answer of the evaluation", error)
        return evaluation

    @contextmanager
    def _run_environment(self) -> Iterator[ExitStack]:
        """This process's only run: its data is written, and its functions can be called."""
        if not _ONE_RUN.acquire(blocking=False):
            raise UserError("this process trains already", "wait for its run, or start another process")
        with ExitStack() as stack:
            stack.callback(_ONE_RUN.release)
            for problems in self._data.values():
                problems.write(data_directory(self.config))
            stack.enter_context(_explained(self._functions.errors))
            stack.enter_context(environment(self._environment(stack)))
            yield stack

    def _environment(self, stack: ExitStack) -> dict[str, str]:
        """Variables for the run's processes: where this process's modules are, and the address of its functions."""
        modules = {"PYTHONPATH": os.pathsep.join(sys.path)}
        if not self._functions.functions and self._functions.session is None:
            return modules
        server = stack.enter_context(self._functions)
        return {**modules, ADDRESS_VARIABLE: server.address}


def _observer(on_step: Callable[..., object] | None, callbacks: "Iterable[AnyCallback]") -> Observer:
    function = None if on_step is None else step_input(on_step)
    return Callbacks(callback_input(callbacks), function) if callbacks else StepFunction(function)


def _console() -> Console:
    """In a notebook, plain lines on standard output: standard error is red, and a live table would be printed again at
    each update. Else standard error, as the command."""
    if Console().is_jupyter:
        return Console(force_jupyter=False, force_terminal=False)
    return Console(stderr=True)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables of this process until the block ends."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _explained(raised: Mapping[str, BaseException]) -> Iterator[None]:
    """Turns errors of a server that the user named into RunFailed.

    raised: the first exception of each function of this process, by name. It becomes the `__cause__` of the error if
    the run failed because of that function.
    """
    try:
        yield
    except ClientError as error:
        raise RunFailed(str(error), remedy(error, ENV_PREFIX)) from error
    except (RunFailed, UserError) as error:
        names = [name for name in raised if re.search(rf"\b{CALLER}:{name}\b", str(error))]
        if not names:
            raise
        raise error from raised[names[0]]


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

    def __str__(self) -> str:
        if self.finished:
            return f"{self.steps} steps; the model is in {self.model}"
        return f"stopped after {self.steps} steps; the same call with resume=True goes on"


def _result(config: TrainConfig, outcome: "TrainResult") -> GRPOResult:
    """The result, with what the run's directory holds."""
    from policy_trainer.run_files.checkpoint import Checkpoints  # late: it loads PyTorch

    directory = RunDirectory(config.run_dir)
    checkpoints = Checkpoints(directory.checkpoints, keep=config.checkpoint.save_total_limit)
    model = directory.model if outcome.finished else checkpoints.newest()
    best = None if outcome.best_step is None else checkpoints.of_step(outcome.best_step)
    records = read_metrics(directory.metrics)
    return GRPOResult(
        finished=outcome.finished,
        steps=outcome.steps,
        run_dir=directory.root,
        model=str(model) if model else None,
        best_model=str(best) if best else None,
        history=[record for record in records if record["kind"] == "step"],
        evaluations=[record for record in records if record["kind"] == "evaluation"],
    )
