"""A file is locked by one process at a time."""

import os
import stat
from itertools import pairwise
from pathlib import Path

import pytest

from policy_trainer.run_files.locks import hold, hold_to_read, let_go
from shared.errors import UserError


def test_other_users_cannot_open_a_lock(tmp_path: Path) -> None:
    """A process that may read a file may lock it."""
    with hold(tmp_path / "lock", "it is taken"):
        assert not stat.S_IMODE((tmp_path / "lock").stat().st_mode) & 0o007


def test_a_wait_reports_its_length_and_may_be_stopped(tmp_path: Path) -> None:
    earlier, waits = hold(tmp_path / "lock", "it is taken"), []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            earlier.close()

    hold(tmp_path / "lock", "it is taken", seconds=60, on_wait=wait).close()
    assert len(waits) == 3 and all(before < after for before, after in pairwise(waits))

    def stop(seconds: float) -> None:
        raise InterruptedError

    with hold(tmp_path / "lock", "it is taken"), pytest.raises(InterruptedError):
        hold(tmp_path / "lock", "it is taken", seconds=60, on_wait=stop)


def test_several_readers_keep_a_writer_out_and_a_writer_keeps_readers_out(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with hold(file, "it is taken"):
        assert hold_to_read(file) is None
    first, second = hold_to_read(file), hold_to_read(file)
    assert first is not None and second is not None
    with first, second, pytest.raises(UserError, match="it is read"):
        hold(file, "it is read")
    hold(file, "it is taken").close()


def test_a_lock_ends_even_if_a_child_has_the_file_open(tmp_path: Path) -> None:
    lock = hold(tmp_path / "lock", "it is taken")
    inherited = os.dup(lock.fileno())  # as a forked child has it
    try:
        let_go(lock)
        hold(tmp_path / "lock", "it is taken").close()
    finally:
        os.close(inherited)
