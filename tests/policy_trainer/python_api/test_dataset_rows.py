"""Pictures of a caller's dataset, as Arrow arrays."""

from typing import Any

import pyarrow
import pytest

from policy_trainer.python_api.dataset_rows import _with_absolute_paths

PICTURE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


@pytest.mark.parametrize("many", [False, True])
def test_pictures_in_the_dataset_are_not_copied(many: bool) -> None:
    picture: dict[str, Any] = {"bytes": b"picture", "path": "a.png"}
    values, kind = ([[picture], [], None], pyarrow.list_(PICTURE)) if many else ([picture, None], PICTURE)
    table = pyarrow.table({"images": pyarrow.array(values, kind)})
    assert _with_absolute_paths(table) is table
    named = [{"bytes": None, "path": "a.png"}]
    table = pyarrow.table({"images": pyarrow.array([named] if many else named, kind)})
    assert _with_absolute_paths(table) is not table
