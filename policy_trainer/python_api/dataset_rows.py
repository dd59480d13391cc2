"""The rows of a caller's `datasets.Dataset`, as iterating over it would give them, for a file that other processes
read."""

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from policy_trainer.data.pictures import PICTURE_COLUMNS, absolute, with_readable_pictures
from shared.errors import UserError

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset

_ROWS_AT_ONCE = 1000
# A transform may return large pictures.
_TRANSFORMED_AT_ONCE = 32
# Rows that are transformed twice, to check that the transform is deterministic.
_COMPARED = 64


def as_read(dataset: "Dataset", name: str) -> "Dataset":
    """The dataset without the columns that its format hides, and with its transform applied once to all rows. Values of
    NumPy's and PyTorch's formats stay plain.

    name: of the argument, for errors. Raises UserError for a transform whose rows cannot be stored, or that is not
    deterministic: every process, and the run when it is resumed, must see the same rows.
    """
    shown: Any = dataset.format
    if shown["type"] == "custom":
        first, again = (_transformed(dataset.select(range(min(_COMPARED, len(dataset)))), name) for _ in range(2))
        if [repr(part.to_pylist()) for part in batches(first)] != [repr(part.to_pylist()) for part in batches(again)]:
            raise UserError(
                f"{name}: its transform returns different rows each time, but a run reads them only once, so that it "
                "can be resumed",
                "apply the transform beforehand with dataset.map(…)",
            )
        return first if len(first) == len(dataset) else _transformed(dataset, name)
    hides = not shown["output_all_columns"] and set(shown["columns"]) != set(dataset.column_names)
    plain = dataset.with_format(None)
    return plain.select_columns(shown["columns"]) if hides else plain


def batches(dataset: "Dataset") -> "Iterator[pyarrow.Table]":
    """The rows in several tables. Picture paths, which are relative to the working directory, become absolute."""
    plain: Any = dataset.with_format("arrow")
    yield from map(_with_absolute_paths, plain.iter(_ROWS_AT_ONCE))


def readable_table(dataset: "Dataset") -> "pyarrow.Table":
    """The rows of `batches` in one table."""
    plain: Any = dataset.with_format("arrow")
    return _with_absolute_paths(plain[:])


def remedy(other: object) -> str:
    """What to pass in place of an object that is not a Dataset."""
    package = type(other).__module__.partition(".")[0]
    if package in ("pandas", "polars"):
        return f"pass datasets.Dataset.from_{package}(frame)"
    return "for a DatasetDict pass one split, for an IterableDataset Dataset.from_list(list(stream.take(n)))"


def _transformed(dataset: "Dataset", name: str) -> "Dataset":
    from datasets import Dataset  # slow to import; a Dataset's owner has imported it already

    rows = []
    for batch in dataset.iter(_TRANSFORMED_AT_ONCE):
        columns: dict[str, Any] = dict(batch)
        for place in range(len(next(iter(columns.values()), ()))):
            row = {key: column[place] for key, column in columns.items()}
            rows.append(with_readable_pictures(row, f"{name}[{len(rows)}]"))
    try:
        return Dataset.from_list(rows)
    except (ValueError, TypeError, NotImplementedError) as error:  # includes pyarrow's errors
        raise UserError(f"{name}: the rows that its transform returns cannot be written as a table: {error}") from None


def _with_absolute_paths(table: "pyarrow.Table") -> "pyarrow.Table":
    for column in {*PICTURE_COLUMNS} & {*table.column_names}:
        if not _may_have_paths(table[column]):
            continue  # pictures stay in their memory-mapped file
        values = table[column].to_pylist()
        readable = [_absolute(value) for value in values]
        if readable != values:
            import pyarrow  # slow to import

            array = pyarrow.array(readable, table.schema.field(column).type)
            table = table.set_column(table.column_names.index(column), table.schema.field(column), array)
    return table


def _may_have_paths(pictures: Any) -> bool:
    """Whether any value of the Arrow array is no picture's bytes."""
    from pyarrow import types  # slow to import

    compute: Any = import_module("pyarrow.compute")  # which makes its functions when it is imported
    while types.is_list(pictures.type) or types.is_large_list(pictures.type):
        pictures = compute.list_flatten(pictures)
    if not types.is_struct(pictures.type) or not {"bytes", "path"} <= {field.name for field in pictures.type}:
        return True
    without = compute.is_null(compute.struct_field(pictures, "bytes"))
    named = compute.is_valid(compute.struct_field(pictures, "path"))
    return bool(compute.any(compute.and_(without, named)).as_py())


def _absolute(value: Any) -> Any:
    if isinstance(value, list):
        return [_absolute(each) for each in value]
    if isinstance(value, dict) and value.get("bytes") is None and value.get("path"):
        return {**value, "path": absolute(value["path"])}
    return absolute(value) if isinstance(value, str) else value
