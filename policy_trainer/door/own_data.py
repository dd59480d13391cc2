"""Problems as Python objects: the file in the run's directory that holds them for every process, and its settings."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, Union

from policy_trainer.config import TrainConfig
from shared.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

Problems = Union["Dataset", Sequence[Mapping[str, Any]], str, Path]

_FILES = (".jsonl", ".json", ".parquet")
_ROWS_AT_ONCE = 1000
# Where problems are -> the task that reads them.
_TASKS = {"path": "jsonl", "dataset": "dataset"}


@dataclass(frozen=True)
class Named:
    """Problems that every process finds itself. settings: `path`, or `dataset`."""

    settings: Mapping[str, str]

    def placed(self, directory: Path) -> Mapping[str, str]:
        return self.settings

    def write(self, directory: Path) -> None:
        pass


@dataclass(frozen=True)
class Written:
    """Problems that go to a file in the run's directory. save: writes them to a path."""

    file: str
    save: Callable[[Path], object]

    def placed(self, directory: Path) -> Mapping[str, str]:
        return {"path": str(directory / self.file)}

    def write(self, directory: Path) -> None:
        """Writes the file, unless it is there. Raises UserError if that fails."""
        path, temporary = directory / self.file, directory / f".{self.file}.tmp"
        try:
            if not path.exists():
                directory.mkdir(parents=True, exist_ok=True)
                self.save(temporary)
                temporary.replace(path)
        except OSError as error:
            raise UserError(f"run_dir: {path} cannot be written: {error}; choose another run_dir") from error


OwnData = Named | Written


def own_data(problems: Problems, name: str) -> OwnData:
    """Problems for the processes of a run. name: the argument, for errors.

    Raises UserError for what holds no problems.
    """
    if isinstance(problems, str | Path):
        is_file = Path(problems).suffix in _FILES or Path(problems).is_file()
        return Named({"path" if is_file else "dataset": str(problems)})
    # The file's name has a hash of its content, so that a resumed run is told when the problems are others.
    if isinstance(problems, Sequence) and problems and all(isinstance(row, Mapping) for row in problems):
        return _lines(problems, name)
    if _is_dataset(problems):
        return _table(problems, name)
    raise UserError(
        f"{name}: must be a datasets.Dataset or a list of dicts, with rows, or a path, got a "
        f"{type(problems).__name__}; of a DatasetDict give one split, of an IterableDataset list(….take(n))"
    )


def with_data(settings: Mapping[str, Any], data: Mapping[str, OwnData]) -> dict[str, Any]:
    """The settings with the places of problems, by the beginning of the setting's name. They are below the directory
    that the settings will name. Raises UserError if the settings name other problems."""
    given = settings.get("data", {})
    places = {f"{kind}{name}": value for kind, one in data.items() for name, value in one.placed(Path()).items()}
    if "eval_dataset" in places:
        raise UserError("eval_dataset: must be rows or a file; a split of a Hub dataset is data={'eval_split': …}")
    if clash := [name for name in places if name in given]:
        raise UserError(f"data.{clash[0]}: leave it out, or leave out the argument that has the problems")
    tasks = [task for name, task in _TASKS.items() if name in places]
    return {**({"task": tasks[0]} if tasks else {}), **settings, **({"data": {**given, **places}} if places else {})}


def placed(config: TrainConfig, data: Mapping[str, OwnData]) -> TrainConfig:
    """The configuration, where problems that are written lie in the run's directory."""
    written = {kind: one for kind, one in data.items() if isinstance(one, Written)}
    paths = {f"{kind}path": data_directory(config) / one.file for kind, one in written.items()}
    return config.model_copy(update={"data": config.data.model_copy(update=paths)})


def data_directory(config: TrainConfig) -> Path:
    return config.run_dir / "data"


def _is_dataset(problems: Any) -> "TypeGuard[Dataset]":
    from datasets import Dataset  # slow to import, but whoever has a Dataset has done so

    return isinstance(problems, Dataset) and len(problems) > 0


def _table(dataset: "Dataset", name: str) -> Written:
    plain = dataset.with_format("arrow")
    return Written(f"{name}-{_hash(_batches(plain))}.parquet", lambda file: _write_parquet(plain[:], file))


def _batches(plain: Any) -> Iterator[bytes]:
    for batch in plain.iter(_ROWS_AT_ONCE):
        yield repr(batch.to_pylist()).encode()


def _write_parquet(table: Any, file: Path) -> None:
    from pyarrow import parquet

    parquet.write_table(table, file)


def _lines(rows: Sequence[Mapping[str, Any]], name: str) -> Written:
    lines = [_line(row, f"{name}[{number}]") for number, row in enumerate(rows)]
    return Written(
        f"{name}-{_hash(line.encode() for line in lines)}.jsonl", lambda file: file.write_text("".join(lines))
    )


def _line(row: Mapping[str, Any], where: str) -> str:
    try:
        return json.dumps(dict(row)) + "\n"
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: cannot be written as JSON: {error}; a datasets.Dataset keeps such values") from None


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:12]
