"""Rows of files and of Hugging Face datasets, each with the place to name in an error."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shared.errors import UserError

if TYPE_CHECKING:
    import pyarrow

Row = Mapping[str, Any]

# What `save_to_disk` leaves beside the data of one split, or of several.
_SAVED_FILES = ("state.json", "dataset_dict.json")


class Rows(Protocol):
    @property
    def columns(self) -> Sequence[str]:
        """All that any row has, also those that were not asked for."""
        ...

    def __len__(self) -> int: ...

    def row(self, number: int) -> Row:
        """The values of the columns that were asked for and that it has."""
        ...

    def where(self, number: int) -> str:
        """What a person would look for to find this row."""
        ...


class JsonLines:
    """The lines of a file, without blank ones. Raises UserError, naming file and line, for one that is no object."""

    def __init__(self, path: Path, columns: Sequence[str], setting: str) -> None:
        try:
            # Not splitlines: it also splits at characters that JSON allows within a text, such as U+2028.
            lines = path.read_text(encoding="utf-8").split("\n")
        except OSError as error:
            raise UserError(f"{setting}: {path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{setting}: {path} is not UTF-8 text: {error}") from None
        self._path = path
        self._numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
        self._rows, seen = [], dict[str, None]()
        for number in self._numbers:
            record = _record(lines[number - 1], f"{path}:{number}", columns)
            seen.update(dict.fromkeys(record))
            self._rows.append({name: record[name] for name in columns if name in record})
        self.columns = tuple(seen)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Row:
        return self._rows[number]

    def where(self, number: int) -> str:
        return f"{self._path}:{self._numbers[number]}"


class ArrowRows:
    """The rows of a table, which may lie on disk: none is kept as Python objects."""

    def __init__(self, table: "pyarrow.Table", columns: Sequence[str], source: str, *, seen: Sequence[str]) -> None:
        """columns: those that were asked for. seen: all that there are; the table may lack some."""
        self.columns = seen
        self._columns = {name: table.column(name) for name in columns if name in table.column_names}
        self._length = table.num_rows
        self._source = source

    def __len__(self) -> int:
        return self._length

    def row(self, number: int) -> Row:
        return {name: column[number].as_py() for name, column in self._columns.items()}

    def where(self, number: int) -> str:
        return f"{self._source}, row {number + 1}"


def read_file(path: Path, columns: Sequence[str], setting: str) -> Rows:
    """Rows of a parquet file, by its suffix, or of a JSONL file by any other. setting: the field to name in errors."""
    rows = _read_parquet(path, columns, setting) if path.suffix == ".parquet" else JsonLines(path, columns, setting)
    if not len(rows):
        raise UserError(f"{setting}: {path} has no problems")
    return rows


def read_dataset(name: str, subset: str | None, split: str, columns: Sequence[str]) -> Rows:
    """Rows of one split of a dataset: of the Hub, or of a directory. No code of a dataset is ever run.

    Raises UserError, saying what was tried, where it cannot be loaded.
    """
    from datasets import Dataset, load_dataset  # slow, and of no use to most tasks
    from datasets.exceptions import DatasetsError

    tried = f"{name}, {f'subset {subset}, ' if subset else ''}split {split}"
    try:
        saved = _is_saved(Path(name))
        loaded = _load_saved(Path(name), split) if saved else load_dataset(name, subset, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        reason = str(error).partition("\n")[0]
        remedy = "without a network, give a local file as data.path, or a directory as data.dataset"
        raise UserError(f"data.dataset: {tried} cannot be loaded: {reason}; {remedy}") from error
    assert isinstance(loaded, Dataset)
    if not len(loaded):
        raise UserError(f"data.dataset: {tried} has no rows")
    return ArrowRows(_table(loaded), columns, tried, seen=loaded.column_names)


def _record(line: str, where: str, columns: Sequence[str]) -> Row:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: must be an object with {', '.join(columns)}")
    return record


def _read_parquet(path: Path, columns: Sequence[str], setting: str) -> Rows:
    import pyarrow
    from pyarrow import parquet

    try:
        names = parquet.read_schema(path).names
        table = parquet.read_table(path, columns=[name for name in names if name in columns])
        return ArrowRows(table, columns, str(path), seen=names)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{setting}: {path} cannot be read as parquet: {error}") from None


def _table(dataset: Any) -> "pyarrow.Table":
    """Without a copy of what lies on disk."""
    return dataset.with_format("arrow")[:]


def _is_saved(directory: Path) -> bool:
    return any((directory / name).exists() for name in _SAVED_FILES)


def _load_saved(directory: Path, split: str) -> Any:
    """A split of what `save_to_disk` left. One that was saved alone has no name: it is the one to train on."""
    from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(str(directory))
    if isinstance(saved, DatasetDict):
        if split not in saved:
            raise ValueError(f"it has the splits {', '.join(map(str, saved))}")
        return saved[split]
    if split != "train":
        raise ValueError("it was saved without splits, so that it has train alone")
    return saved
