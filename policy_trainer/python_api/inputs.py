"""Problems, rewards, tools and environments as Python objects, for the settings and processes of a run.

Problems go to a file in the run's directory. Functions and classes become names; those that no other process can import
stay here.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from policy_trainer.config import TrainConfig
from policy_trainer.config.functions import CALLER
from policy_trainer.data.pictures import with_readable_pictures
from policy_trainer.python_api.dataset_rows import as_read, batches, readable_table, remedy
from policy_trainer.rewards.functions import RewardFunction, reward_function
from policy_trainer.rollout.environments.toolbox import Toolbox
from shared.atomic_files import atomic_file
from shared.errors import UserError
from shared.spelling import spell_name, spell_setting

if TYPE_CHECKING:
    from datasets import Dataset


Problems = Union["Dataset", Sequence[Mapping[str, Any]], str, Path]

_FILES = (".jsonl", ".json", ".parquet")
# The setting that names the problems' place -> the task that reads them.
_TASKS = {"path": "jsonl", "dataset": "dataset"}


@dataclass(frozen=True)
class ProblemInput:
    """Problems that every process reads from their place. setting: `path`, or `dataset`. value: of the setting.

    save: writes them to a path; None for problems that are there already. Else `value` is the name of a file in the
    run's directory.
    """

    setting: str
    value: str
    save: Callable[[Path], object] | None = None

    def placed(self, directory: Path) -> Mapping[str, str]:
        return {self.setting: str(directory / self.value) if self.save else self.value}

    def write(self, directory: Path) -> None:
        """Writes the file, unless it is there. Raises UserError if that fails."""
        if self.save is None:
            return
        path = directory / self.value
        try:
            if not path.exists():
                directory.mkdir(parents=True, exist_ok=True)
                with atomic_file(path) as temporary:
                    self.save(temporary)
        except OSError as error:
            raise UserError(
                f"{spell_name('run_dir')}: {path} cannot be written: {error}",
                f"choose another {spell_setting('run_dir')}",
            ) from error


def problem_input(problems: Problems, name: str) -> ProblemInput:
    """Problems for the processes of a run. name: the argument, for errors.

    Raises UserError for what holds no problems.
    """
    if isinstance(problems, str | Path):
        is_file = Path(problems).suffix in _FILES or Path(problems).is_file()
        return ProblemInput("path" if is_file else "dataset", str(problems))
    # The file's name has a hash of its content, so that a resumed run fails if the problems have changed.
    if isinstance(problems, Sequence) and problems and all(isinstance(row, Mapping) for row in problems):
        return _lines(problems, name)
    from datasets import Dataset  # slow to import; a Dataset's owner has imported it already

    if isinstance(problems, Dataset) and len(problems) > 0:
        return _table(problems, name)
    raise UserError(
        f"{name}: must be a datasets.Dataset or a list of dicts, with rows, or a path, got a "
        f"{type(problems).__name__}; {remedy(problems)}"
    )


def with_data(settings: Mapping[str, Any], data: Mapping[str, ProblemInput]) -> dict[str, Any]:
    """The settings with the places of problems, by the beginning of the setting's name. They are below the directory
    that the settings will name. Raises UserError if the settings name other problems."""
    given = settings.get("data", {})
    places = {
        f"{kind}{name}": value for kind, problems in data.items() for name, value in problems.placed(Path()).items()
    }
    if "eval_dataset" in places:
        raise UserError("eval_dataset: must be rows or a file; a split of a Hub dataset is data={'eval_split': …}")
    if clash := [name for name in places if name in given]:
        raise UserError(f"data.{clash[0]}: leave it out, or leave out the argument that has the problems")
    tasks = [task for name, task in _TASKS.items() if name in places]
    return {**({"task": tasks[0]} if tasks else {}), **settings, **({"data": {**given, **places}} if places else {})}


def placed(config: TrainConfig, data: Mapping[str, ProblemInput]) -> TrainConfig:
    """The configuration, where problems that are written lie in the run's directory."""
    written = {kind: problems for kind, problems in data.items() if problems.save}
    paths = {f"{kind}path": data_directory(config) / problems.value for kind, problems in written.items()}
    return config.model_copy(update={"data": config.data.model_copy(update=paths)})


def data_directory(config: TrainConfig) -> Path:
    return config.run_dir / "data"


def _table(dataset: "Dataset", name: str) -> ProblemInput:
    from pyarrow import parquet  # slow to import

    dataset = as_read(dataset, name)
    parts = (repr(batch.to_pylist()).encode() for batch in batches(dataset))
    file = f"{name}-{_hash(parts)}.parquet"
    return ProblemInput("path", file, lambda path: parquet.write_table(readable_table(dataset), path))


def _lines(rows: Sequence[Mapping[str, Any]], name: str) -> ProblemInput:
    lines = [_line(row, f"{name}[{number}]") for number, row in enumerate(rows)]
    name = f"{name}-{_hash(line.encode() for line in lines)}.jsonl"
    return ProblemInput("path", name, lambda file: file.write_text("".join(lines)))


def _line(row: Mapping[str, Any], where: str) -> str:
    try:
        return json.dumps(with_readable_pictures(row, where)) + "\n"
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: cannot be written as JSON: {error}; a datasets.Dataset keeps such values") from None


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:12]


Function = Callable[..., Any]


def reward_input(rewards: str | Function | Iterable[str | Function]) -> tuple[list[str], dict[str, RewardFunction]]:
    """The names of all rewards, for `rewards`; and those that run in this process, by the name after `caller:`.

    Raises UserError for what is neither a name nor a function.
    """
    several = [rewards] if isinstance(rewards, str) or callable(rewards) else list(rewards)
    names, here = [], {}
    for reward in several:
        if isinstance(reward, str):
            names.append(reward)
        elif not callable(reward):
            raise UserError(f"rewards: must be names and functions, got {reward!r}")
        elif name := importable_name(reward):
            names.append(name)
        else:
            name = _local_name(reward, here)
            names.append(f"{CALLER}:{name}")
            here[name] = reward_function(name, reward)
    return names, here


def turns_input(
    tools: Iterable[str | Function], environments: str | Function | Mapping[str, str | Function] | None
) -> tuple[dict[str, list[str]], Toolbox]:
    """The settings `tools` and `environment`, those that are needed; and the objects that stay in this process.

    Raises UserError for what is neither a name nor callable.
    """
    several = [] if isinstance(tools, str) else [*tools]
    if isinstance(tools, str) or not all(isinstance(each, str) or callable(each) for each in several):
        raise UserError(f"tools: must be a list of functions and names, got {tools!r}")
    named = environments if isinstance(environments, Mapping) else {"": environments} if environments else {}
    if wrong := [each for each in named.values() if not isinstance(each, str) and not callable(each)]:
        raise UserError(f"environment_factory: must be a class, or a dict of classes by name, got {wrong[0]!r}")
    here = Toolbox({}, {})
    labels = [_label(each, here.tools) for each in several]
    factories = [f"{name}={_label(each, here.environments)}".removeprefix("=") for name, each in named.items()]
    settings = {"tools": labels, "environment": factories}
    return {name: values for name, values in settings.items() if values}, here


def loss_input(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings, where functions of `loss` that any process can import are names. The others stay functions."""
    loss = settings.get("loss")
    if not isinstance(loss, Mapping):
        return settings
    functions = {name: value for name, value in loss.items() if callable(value)}
    return {
        **settings,
        "loss": {**loss, **{name: importable_name(value) or value for name, value in functions.items()}},
    }


def _label(given: str | Function, here: dict[str, Function]) -> str:
    """`module:name`, or `caller:name` of what cannot be imported, which is added to `here`."""
    if isinstance(given, str):
        return given
    if name := importable_name(given):
        return name
    label = f"{CALLER}:{_local_name(given, [each.partition(':')[2] for each in here])}"
    here[label] = given
    return label


def importable_name(function: Any) -> str | None:
    """Returns `module:name` if another process would import this very function from there, else None.

    None: what a notebook, a script or another function has defined, lambdas, methods, and functions of a module that
    was loaded from its path.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or module == "__main__" or getattr(sys.modules.get(module), name, None) is not function:
        return None
    origin = _loaded_origin(module)
    return f"{module}:{name}" if origin and origin == _origin(module) else None


def _origin(module: str) -> str | None:
    """Returns the file that another process would import as this module. importlib's find_spec does not tell: it takes
    the answer from sys.modules."""
    path, spec, parts = None, None, module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        # As in importlib: a finder may lack the method, must accept a target, and may forbid a module.
        finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
        try:
            spec = next(filter(None, (finder.find_spec(name, path, None) for finder in finders)), None)
        except ImportError:
            return None
        if spec is None:
            return None
        # A package's own code may have added to its path.
        same = spec.origin and spec.origin == _loaded_origin(name)
        path = getattr(sys.modules[name], "__path__", None) if same else spec.submodule_search_locations
    return spec.origin if spec and spec.has_location else None


def _loaded_origin(module: str) -> str | None:
    """Returns the file of a module in sys.modules; None if it has none. The entry may be any object."""
    return getattr(getattr(sys.modules.get(module), "__spec__", None), "origin", None)


def _local_name(function: Function, taken: Iterable[str]) -> str:
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return _unused(name if name.isidentifier() else "function", taken)


def _unused(name: str, taken: Iterable[str]) -> str:
    numbered = (f"{name}_{number}" for number in count(2))
    return next(free for free in chain([name], numbered) if free not in taken)
