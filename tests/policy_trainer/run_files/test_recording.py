"""A recording has the batches of each step, and only those of steps that count."""

from collections.abc import Callable
from pathlib import Path

import pytest

from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.run_files.recording import open_recording, read_recording, record
from shared import wire
from shared.batch import Batch
from shared.errors import UserError

Make = Callable[..., Batch]


def ids_of(root: Path, groups_per_step: int = 2) -> list[tuple[int, list[str]]]:
    return [(step, [batch.id for batch in batches]) for step, batches in read_recording(root, groups_per_step)]  # type: ignore[union-attr]


@pytest.fixture
def batches(make_scored: Make) -> list[Batch]:
    return [make_scored([1, 2], [[3], [4, 5]], [0.0, 1.0], number=9 - number) for number in range(5)]


def test_steps_come_back_in_order_with_their_batches(batches: list[Batch], tmp_path: Path) -> None:
    open_recording(tmp_path / "recorded", resumed_at=None)
    record(tmp_path / "recorded", 1, batches[:2])
    record(tmp_path / "recorded", 2, batches[2:])
    assert ids_of(tmp_path / "recorded") == [
        (1, [batch.id for batch in batches[:2]]),
        (2, [batch.id for batch in batches[2:]]),
    ]
    [file] = (tmp_path / "recorded" / "step-00000001").glob("00000-*")
    assert wire.content_hash(file.read_bytes()) == wire.content_hash(wire.encode(batches[0]))


def test_a_resumed_run_forgets_the_steps_after_its_checkpoint(batches: list[Batch], tmp_path: Path) -> None:
    for step in (1, 2, 3):
        record(tmp_path, step, batches[:1])
    open_recording(tmp_path, resumed_at=1)
    record(tmp_path, 2, batches[1:2])
    assert [step for step, _ in ids_of(tmp_path)] == [1, 2]
    with pytest.raises(UserError, match=r"^record: .* holds a recording already; choose another"):
        open_recording(tmp_path, resumed_at=None)


def test_loose_batches_are_cut_into_steps(batches: list[Batch], tmp_path: Path) -> None:
    for place, batch in enumerate(batches):
        (tmp_path / f"{place}.safetensors").write_bytes(wire.encode(batch))
    assert [len(ids) for _, ids in ids_of(tmp_path)] == [2, 2, 1]


def test_what_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^batches: .* holds no batches; .*train --record"):
        read_recording(tmp_path / "missing", 2)
    (tmp_path / "broken.safetensors").write_bytes(b"no batch")
    with pytest.raises(UserError, match=r"^batches: .*broken.safetensors is no batch"):
        ids_of(tmp_path)


def test_a_place_that_cannot_be_written_ends_the_run(batches: list[Batch], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFailed, match=r"file.* cannot be written"):
        record(tmp_path / "file" / "recorded", 1, batches)
