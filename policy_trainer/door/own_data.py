"""Problems as Python objects: the file in the run's directory that holds them for every process, and its settings."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from shared.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

Problems = Union["Dataset", Sequence[Mapping[str, Any]], str, Path]

_FILES = (".jsonl", ".json", ".parquet")
_ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class OwnData:
    """settings: `path`, or `dataset`. write: makes the file if it is not there."""

    settings: Mapping[str, str]
    write: Callable[[], None] = lambda: None

    @property
    def task(self) -> str:
        return "jsonl" if "path" in self.settings else "dataset"


def own_data(problems: Problems, directory: Path, name: str) -> OwnData:
    """Problems for the processes of a run. directory: where a file of them goes. name: the argument, for errors.

    Raises UserError for what holds no problems.
    """
    if isinstance(problems, str | Path):
        is_file = Path(problems).suffix in _FILES or Path(problems).is_file()
        return OwnData({"path" if is_file else "dataset": str(problems)})
    # Its name has a hash of the content, so that a resumed run is told when the problems are others.
    if isinstance(problems, Sequence) and problems and all(isinstance(row, Mapping) for row in problems):
        return _lines(problems, directory, name)
    if _is_dataset(problems):
        return _table(problems, directory, name)
    raise UserError(
        f"{name}: must be a datasets.Dataset, a list of dicts that is not empty, or a path, got "
        f"{type(problems).__name__}; of a DatasetDict give one split, of an IterableDataset list(….take(n))"
    )


def _is_dataset(problems: Any) -> bool:
    from datasets import Dataset  # slow to import, but whoever has a Dataset has done so

    return isinstance(problems, Dataset) and len(problems) > 0


def _table(dataset: "Dataset", directory: Path, name: str) -> OwnData:
    plain = dataset.with_format("arrow")
    path = directory / f"{name}-{_hash(_batches(plain))}.parquet"
    return OwnData({"path": str(path)}, lambda: _keep(path, lambda file: _write_parquet(plain[:], file)))


def _batches(plain: Any) -> Iterator[bytes]:
    for batch in plain.iter(_ROWS_AT_ONCE):
        yield repr(batch.to_pylist()).encode()


def _write_parquet(table: Any, file: Path) -> None:
    from pyarrow import parquet

    parquet.write_table(table, file)


def _lines(rows: Sequence[Mapping[str, Any]], directory: Path, name: str) -> OwnData:
    lines = [_line(row, f"{name}[{number}]") for number, row in enumerate(rows)]
    path = directory / f"{name}-{_hash(line.encode() for line in lines)}.jsonl"
    return OwnData({"path": str(path)}, lambda: _keep(path, lambda file: file.write_text("".join(lines))))


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


def _keep(path: Path, write: Callable[[Path], object]) -> None:
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"run_dir: {path} cannot be written: {error}; choose another run_dir") from error
