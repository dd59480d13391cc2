"""Rows of files and of Hugging Face datasets, and their fields. Each row knows its place, for error messages."""

import json
import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from policy_trainer.config.data import OWN_TEMPLATE_KWARGS
from shared.errors import UserError

if TYPE_CHECKING:
    import pyarrow

Row = Mapping[str, Any]
# What happens to the columns that a task does not request.
Others = Literal["ignored", "kept"]

# The files that `save_to_disk` adds to the data: the first for one split, the second for several.
_SAVED_FILES = ("state.json", "dataset_dict.json")


@dataclass(frozen=True)
class Rows:
    """columns: of all rows, including those that were not requested. row: the values of the requested columns that the
    row of this number has; None in a column that is kept and missing here. where: its place, for error messages.
    folder: in which relative paths in the rows begin."""

    columns: Sequence[str]
    row: Callable[[int], Row]
    where: Callable[[int], str]
    length: int
    folder: Path = Path()

    def __len__(self) -> int:
        return self.length


def _json_lines(path: Path, columns: Sequence[str], setting: str, others: Others) -> Rows:
    """The lines of a JSONL file, without blank ones. Raises UserError, with file and line, for a line that is not a
    JSON object."""
    try:
        # -sig drops the byte order mark that some programs write. Not splitlines, which also splits at characters that
        # JSON allows inside strings, such as U+2028.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(f"{setting}: {path} cannot be read: {error.strerror}", "check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{setting}: {path} is not UTF-8 text: {error}") from None
    places = [f"{path}:{number}" for number, line in enumerate(lines, 1) if line.strip()]
    rows, names = [], dict[str, None]()
    for line, place in zip(filter(str.strip, lines), places, strict=True):
        record = _record(line, place, columns)
        names.update(dict.fromkeys(record))
        rows.append({name: record[name] for name in _chosen(record, columns, others)})
    kept = names if others == "kept" else {}
    return Rows(tuple(names), lambda number: {**kept, **rows[number]}, places.__getitem__, len(rows), path.parent)


def _table_rows(table: "pyarrow.Table", source: str, names: Sequence[str], folder: Path) -> Rows:
    """The rows of a table. They become Python objects only on access, so the table may be a memory-mapped file.

    names: all columns of the source; the table may have fewer. folder: see Rows.
    """
    columns = {name: _shortest(table.column(name)) for name in table.column_names}

    def row(number: int) -> Row:
        return {name: _without_missing_arguments(column[number].as_py()) for name, column in columns.items()}

    return Rows(names, row, lambda number: f"{source}, row {number + 1}", table.num_rows, folder)


def _without_missing_arguments(value: Any, *, below: bool = False) -> Any:
    """The value without None below `arguments`, of calls: a table has it for what other calls have."""
    if isinstance(value, dict):
        return {
            name: _without_missing_arguments(each, below=below or name == "arguments")
            for name, each in value.items()
            if each is not None or not below
        }
    return [_without_missing_arguments(each, below=below) for each in value] if isinstance(value, list) else value


def _shortest(column: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
    """float32 values as their shortest decimals: as Python floats they would print as 0.10000000149011612."""
    import pyarrow

    if not pyarrow.types.is_float32(column.type):
        return column
    return column.cast(pyarrow.string()).cast(pyarrow.float64())


def read_file(path: Path, columns: Sequence[str], setting: str, others: Others = "ignored") -> Rows:
    """Rows of a file: parquet if its suffix is .parquet, else JSONL. setting: the field to name in errors.

    columns: those that a task requests. others: what happens to the rest.
    """
    read = _read_parquet if path.suffix == ".parquet" else _json_lines
    rows = read(path, columns, setting, others)
    if not len(rows):
        raise UserError(f"{setting}: {path} has no problems", "write one JSON object a line")
    return rows


def read_dataset(name: str, subset: str | None, split: str, columns: Sequence[str], others: Others = "ignored") -> Rows:
    """Rows of one split of a dataset, from the Hub or from a directory. Code of a dataset is never run.

    Raises UserError if it cannot be loaded.
    """
    from datasets import Dataset, load_dataset  # slow to import, and most tasks do not need it
    from datasets.exceptions import DatasetsError

    tried = f"{name}, {f'subset {subset}, ' if subset else ''}split {split}"
    try:
        if any((Path(name) / file).exists() for file in _SAVED_FILES):
            loaded = _load_saved(Path(name), split)
        else:
            with offline_without_network():
                loaded = load_dataset(name, subset, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        reason = str(error).partition("\n")[0]
        remedy = "without a network, give a local file as data.path, or a directory as data.dataset"
        raise UserError(f"data.dataset: {tried} cannot be loaded: {reason}", remedy) from error
    assert isinstance(loaded, Dataset)
    if not len(loaded):
        raise UserError(f"data.dataset: {tried} has no rows")
    table: Any = loaded.with_format("arrow")[:]  # without a copy of the data on disk
    chosen = table.select(_chosen(table.column_names, columns, others))
    return _table_rows(chosen, tried, loaded.column_names, Path(name if Path(name).is_dir() else "."))


def _record(line: str, where: str, columns: Sequence[str]) -> Row:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON: {error}", "write one JSON object a line") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: must be an object with {', '.join(columns)}", "write one a line, not a list")
    return record


def _chosen(names: Iterable[str], columns: Sequence[str], others: Others) -> list[str]:
    return [name for name in names if others == "kept" or name in columns]


def _read_parquet(path: Path, columns: Sequence[str], setting: str, others: Others) -> Rows:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:  # read_table would import pandas
            names = file.schema_arrow.names
            table = file.read(columns=_chosen(names, columns, others))
        return _table_rows(table, str(path), names, path.parent)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{setting}: {path} cannot be read as parquet: {error}") from None


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


def text_of(row: Row, column: str, where: str) -> str:
    """The text in this column. Raises UserError if it is missing, empty, or not a text."""
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {column} must be a text that is not empty")
    return encodable(value, column, where)


def answer_of(row: Row, column: str, where: str) -> str:
    """The gold answer in this column, a number or a text, as text."""
    value = row.get(column)
    if not can_be_answer(value):
        got = shorten(json.dumps(value, default=str), 60, placeholder=" …")
        raise UserError(f"{where}: {column} must be a number or a text that is not empty, got {got}")
    return encodable(_written(value), column, where)


def can_be_answer(value: object) -> bool:
    """Whether a value can be a gold answer. pandas uses NaN for missing answers. White space would match completions
    without an answer."""
    if isinstance(value, float | Decimal):
        return math.isfinite(value)
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, int) and not isinstance(value, bool)


def _written(value: Any) -> str:
    """A number as people write it: without an exponent, and 72 for 72.0, which pandas makes of 72 in a column with
    missing values. Strings are unchanged."""
    if isinstance(value, float):
        return f"{Decimal(repr(float(value))):f}".removesuffix(".0")
    return f"{value:f}" if isinstance(value, Decimal) else str(value)


def template_kwargs_of(row: Row, where: str) -> Row:
    """The variables of the chat template in the column `chat_template_kwargs`; empty without one.

    A variable that is None is left out: a table has it for rows that lack what others have.
    """
    variables = row.get("chat_template_kwargs")
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        raise UserError(f'{where}: chat_template_kwargs must be an object, as in {{"enable_thinking": false}}')
    if taken := OWN_TEMPLATE_KWARGS & variables.keys():
        raise UserError(f"{where}: chat_template_kwargs: {min(taken)} is set for each prompt", "leave it out")
    return {name: value for name, value in variables.items() if value is not None}


def encodable(text: str, column: str, where: str) -> str:
    """The text. Raises UserError for a lone surrogate: JSON can spell one, but it cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UserError(
            f"{where}: {column} has {half} at character {error.start + 1}: half a surrogate pair",
            "write the whole character, or leave it out",
        ) from None
    return text


@contextmanager
def offline_without_network() -> Iterator[None]:
    """Inside it, datasets are read only from the cache if the Hub's host name cannot be resolved.

    Without a network the Hub's library tries six times, for half a minute, before it looks into the cache. A Hub whose
    name can be resolved may be slow, and is waited for.
    """
    from datasets import config  # slow to import

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or not _has_address(urlsplit(config.HF_ENDPOINT).hostname)
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _has_address(host: str | None) -> bool:
    """Whether the host name can be resolved. True behind a proxy, which may resolve it."""
    if getproxies():
        return True
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False
