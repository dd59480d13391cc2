"""JSON files of a run that a power cut or an editor has damaged: an error names the file and the remedy."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from policy_trainer.rollout.outbox import Outbox
from policy_trainer.run_files.checkpoint import read_saved, read_state
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.weights.published.directory import WeightsDirectory
from shared.errors import UserError

FILES: list[tuple[str, str, Callable[[Path], Any]]] = [
    ("cursor.json", "next_index", lambda root: Outbox(root, worker=0, workers=1, start=0)),
    ("run.json", "lineage", lambda root: RunDirectory(root).lineage),
    ("run.json", "finished", lambda root: RunDirectory(root).finished),
    ("trainer.json", "step", read_state),
    ("latest.json", "version", lambda root: WeightsDirectory(root).newest()),
]


@pytest.mark.parametrize(("name", "field", "read"), FILES)
@pytest.mark.parametrize("wrong", [b"", b'{"lineage": "', b"\xff\xfe", b"[]", b"null", b"[" * 100_000, None])
def test_the_file_and_the_remedy_are_named(
    tmp_path: Path, name: str, field: str, read: Callable[[Path], Any], wrong: bytes | None
) -> None:
    """None: the field has a value of another type."""
    (tmp_path / "model").mkdir()
    (tmp_path / name).write_bytes(json.dumps({field: {}}).encode() if wrong is None else wrong)
    with pytest.raises(UserError, match=rf"{re.escape(str(tmp_path / name))} is damaged.* delete ") as caught:
        read(tmp_path)
    assert str(caught.value).isprintable()


def test_a_state_of_a_newer_version_is_not_read_in_part(tmp_path: Path) -> None:
    (tmp_path / "trainer.json").write_text('{"step": 3, "unknown": 1}')
    with pytest.raises(UserError, match=r"trainer\.json is damaged \(unknown: "):
        read_state(tmp_path)


@pytest.mark.parametrize("name", ["optimizer.pt", "masters/weights.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_tensors_that_were_cut(tmp_path: Path, name: str, share: float) -> None:
    tensor = {"a": torch.zeros(1000)}
    (tmp_path / "masters").mkdir()
    torch.save({"optimizer": tensor, "rng": tensor["a"]}, tmp_path / "optimizer.pt")
    save_file(tensor, tmp_path / "masters/weights.safetensors")
    read_saved(tmp_path)
    body = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(body[: int(share * len(body))])
    with pytest.raises(UserError, match=rf"{name} is damaged; delete {tmp_path} to resume"):
        read_saved(tmp_path)
