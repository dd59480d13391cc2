"""Rows of files and of Hugging Face datasets. Each row knows its place, for error messages."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from policy_trainer.data.hub import asked_if_there
from shared.errors import UserError

if TYPE_CHECKING:
    import pyarrow

Row = Mapping[str, Any]
# What happens to the columns that a task does not ask for.
Others = Literal["ignored", "kept"]

# The files that `save_to_disk` writes beside the data: the first for one split, the second for several.
_SAVED_FILES = ("state.json", "dataset_dict.json")


class Rows(Protocol):
    @property
    def columns(self) -> Sequence[str]:
        """The columns of all rows, including those that were not requested."""
        ...

    def __len__(self) -> int: ...

    def row(self, number: int) -> Row:
        """The values of the requested columns that this row has; None in a column that is kept and missing here."""
        ...

    def where(self, number: int) -> str:
        """The place of this row, for error messages: file and line, or dataset and row."""
        ...


class JsonLines:
    """The lines of a JSONL file, without blank ones.

    Raises UserError, with file and line, for a line that is not a JSON object.
    """

    def __init__(self, path: Path, columns: Sequence[str], setting: str, others: Others = "ignored") -> None:
        try:
            # Not splitlines: it also splits at characters that JSON allows inside a text, such as U+2028.
            lines = path.read_text(encoding="utf-8").split("\n")
        except OSError as error:
            raise UserError(f"{setting}: {path} cannot be read: {error.strerror}; check the path") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{setting}: {path} is not UTF-8 text: {error}") from None
        self._path = path
        self._numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
        self._rows, seen = [], dict[str, None]()
        for number in self._numbers:
            record = _record(lines[number - 1], f"{path}:{number}", columns)
            seen.update(dict.fromkeys(record))
            self._rows.append({name: record[name] for name in record if others == "kept" or name in columns})
        self.columns = tuple(seen)
        self._kept = self.columns if others == "kept" else ()

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Row:
        return {**dict.fromkeys(self._kept), **self._rows[number]}

    def where(self, number: int) -> str:
        return f"{self._path}:{self._numbers[number]}"


class ArrowRows:
    """The rows of a table. They become Python objects only on access, so the table may be a memory-mapped file."""

    def __init__(self, table: "pyarrow.Table", source: str, *, seen: Sequence[str]) -> None:
        """seen: all columns of the source; the table may have fewer."""
        self.columns = seen
        self._columns = {name: table.column(name) for name in table.column_names}
        self._length = table.num_rows
        self._source = source

    def __len__(self) -> int:
        return self._length

    def row(self, number: int) -> Row:
        return {name: column[number].as_py() for name, column in self._columns.items()}

    def where(self, number: int) -> str:
        return f"{self._source}, row {number + 1}"


def read_file(path: Path, columns: Sequence[str], setting: str, others: Others = "ignored") -> Rows:
    """Rows of a file: parquet if its suffix is .parquet, else JSONL. setting: the field to name in errors.

    columns: those that a task asks for. others: what happens to the rest.
    """
    read = _read_parquet if path.suffix == ".parquet" else JsonLines
    rows = read(path, columns, setting, others)
    if not len(rows):
        raise UserError(f"{setting}: {path} has no problems; write one JSON object a line")
    return rows


def read_dataset(name: str, subset: str | None, split: str, columns: Sequence[str], others: Others = "ignored") -> Rows:
    """Rows of one split of a dataset, from the Hub or from a directory. A dataset's own code is never run.

    Raises UserError if it cannot be loaded.
    """
    from datasets import Dataset, load_dataset  # slow to import, and most tasks do not need it
    from datasets.exceptions import DatasetsError

    tried = f"{name}, {f'subset {subset}, ' if subset else ''}split {split}"
    try:
        if _is_saved(Path(name)):
            loaded = _load_saved(Path(name), split)
        else:
            with asked_if_there():
                loaded = load_dataset(name, subset, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        reason = str(error).partition("\n")[0]
        remedy = "without a network, give a local file as data.path, or a directory as data.dataset"
        raise UserError(f"data.dataset: {tried} cannot be loaded: {reason}; {remedy}") from error
    assert isinstance(loaded, Dataset)
    if not len(loaded):
        raise UserError(f"data.dataset: {tried} has no rows")
    table = _table(loaded)
    return ArrowRows(table.select(_chosen(table.column_names, columns, others)), tried, seen=loaded.column_names)


def _record(line: str, where: str, columns: Sequence[str]) -> Row:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON: {error}; write one JSON object a line") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: must be an object with {', '.join(columns)}; write one a line, not a list")
    return record


def _chosen(names: Sequence[str], columns: Sequence[str], others: Others) -> list[str]:
    return [name for name in names if others == "kept" or name in columns]


def _read_parquet(path: Path, columns: Sequence[str], setting: str, others: Others) -> Rows:
    import pyarrow
    from pyarrow import parquet

    try:
        names = parquet.read_schema(path).names
        table = parquet.read_table(path, columns=_chosen(names, columns, others))
        return ArrowRows(table, str(path), seen=names)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{setting}: {path} cannot be read as parquet: {error}") from None


def _table(dataset: Any) -> "pyarrow.Table":
    """The dataset as an Arrow table, without a copy of the data on disk."""
    return dataset.with_format("arrow")[:]


def _is_saved(directory: Path) -> bool:
    return any((directory / name).exists() for name in _SAVED_FILES)


def _load_saved(directory: Path, split: str) -> Any:
    """One split of a directory that `save_to_disk` wrote. A dataset that was saved without splits is `train`."""
    from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(str(directory))
    if isinstance(saved, DatasetDict):
        if split not in saved:
            raise ValueError(f"it has the splits {', '.join(map(str, saved))}")
        return saved[split]
    if split != "train":
        raise ValueError("it was saved without splits, so it has only train")
    return saved
