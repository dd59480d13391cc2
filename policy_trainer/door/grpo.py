"""`GRPO(model=…, dataset=…, rewards=[f], **settings).train()`: a run like that of `policy-trainer train`."""

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from policy_trainer.cli.settings import HINTS
from policy_trainer.config import ENV_PREFIX, TrainConfig
from policy_trainer.door.function_server import FunctionServer
from policy_trainer.door.own_data import Problems, data_directory, own_data, placed, with_data
from policy_trainer.door.own_functions import own_rewards
from policy_trainer.door.result import GRPOResult, read_result
from policy_trainer.door.spelling import in_python
from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.presets import SETTINGS
from policy_trainer.rewards.callers import ADDRESS_VARIABLE, MODULE
from policy_trainer.run_files.run_directory import RunDirectory
from shared.client import ClientError
from shared.client.credentials import remedy
from shared.devices import describe_device
from shared.errors import UserError
from shared.settings import from_python

_HINTS = replace(HINTS, listed="`policy-trainer train --help-all` lists all")
# A run changes the environment that children inherit, so there can be one at a time.
_ONE_RUN = threading.Lock()


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
        given = {"": dataset, "eval_": eval_dataset}
        self._data = {kind: own_data(one, f"{kind}dataset") for kind, one in given.items() if one is not None}
        own = own_rewards(rewards)
        self._functions = FunctionServer(own.here)
        chosen = {"rewards": own.names} if own.names else {}
        values = {**with_data(settings, self._data), "model": str(model), **chosen}
        with _explained({}):
            self.config = placed(from_python(TrainConfig, values, presets=SETTINGS, hints=_HINTS), self._data)

    def train(self) -> GRPOResult:
        """Trains to the last step. Ctrl-C, or a notebook's interrupt, stops between steps with a checkpoint; a second
        stops at once. With `resume=True` the same call goes on.

        Raises UserError for what cannot be used, RunFailed for a run that cannot go on.
        """
        from policy_trainer.trainer.dry_run import dry_run  # late, as in the commands: wrong settings fail at once
        from policy_trainer.trainer.run import train

        console = _console()
        directory = RunDirectory(self.config.run_dir)
        if not (self.config.resume or self.config.dry_run):  # before its data is written there
            directory.refuse_trained("give resume=True to continue it, or another run_dir")
        with _only_run(), ExitStack() as stack:
            console.print(f"device: {describe_device(self.config.device)}", highlight=False)
            for data in self._data.values():
                data.write(data_directory(self.config))
            stack.enter_context(_explained(self._functions.errors))
            stack.enter_context(_environment(self._environment(stack)))
            outcome = (dry_run if self.config.dry_run else train)(self.config, console)
        if self.config.dry_run:  # it has left nothing
            return GRPOResult(outcome.finished, outcome.steps, directory.root)
        result = read_result(self.config, finished=outcome.finished, steps=outcome.steps, best_step=outcome.best_step)
        console.print(str(result), highlight=False, soft_wrap=True)
        return result

    def _environment(self, stack: ExitStack) -> dict[str, str]:
        """What the run's processes find in their environment: this process's modules, and the way to its functions."""
        modules = {"PYTHONPATH": os.pathsep.join(sys.path)}
        if not self._functions.functions:
            return modules
        return {**modules, ADDRESS_VARIABLE: str(stack.enter_context(self._functions).address)}


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(in_python(each) if isinstance(each, str) else each for each in objects), **options)


def _console() -> Console:
    """In a notebook plain lines on standard output: standard error is red, and a live table would be printed anew each
    time. Else as the command."""
    if Console().is_jupyter:
        return _Console(force_jupyter=False, force_terminal=False)
    return _Console(stderr=True)


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
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _explained(raised: Mapping[str, BaseException]) -> Iterator[None]:
    """Spells settings in error messages as in Python, and turns errors of a server that the user named into RunFailed.

    raised: the first exception of each function of this process, by name. It becomes the `__cause__` of the error if
    the run failed because of that function.
    """
    try:
        yield
    except ClientError as error:
        raise RunFailed(in_python(f"{error}{remedy(error, ENV_PREFIX)}")) from error
    except (RunFailed, UserError) as error:
        error.args = (in_python(str(error)),)
        names = [name for name in raised if re.search(rf"\b{MODULE}:{name}\b", str(error))]
        if not names:
            raise
        raise error from raised[names[0]]
