"""The outbox under crashes: whatever the moment, a restart neither skips a problem nor delivers one twice."""

import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.rollout.outbox import Outbox, count_refused


class Server:
    """Remembers the index of each uploaded id; the same id again is the same upload."""

    def __init__(self) -> None:
        self.indexes: dict[str, int] = {}
        self.ids = count()

    def upload(self, body: bytes) -> None:
        index, id = body.decode().split(":")
        self.indexes[id] = int(index)

    def delivered(self, until: int) -> list[int]:
        """Indexes below `until`, once for each id."""
        return sorted(index for index in self.indexes.values() if index < until)


class Worker:
    """Worker k of n; each call of `live` is a process of it, from its start to its end."""

    ROUND = 3

    def __init__(self, directory: Path, server: Server, *, worker: int, workers: int) -> None:
        self.directory, self.server = directory, server
        self.worker, self.workers = worker, workers

    def live(self, until: int, *, start: int = 0, on_upload: Callable[[], None] = lambda: None) -> None:
        """Works until each of its indexes below `until` has been delivered."""
        outbox = Outbox(self.directory, worker=self.worker, workers=self.workers, start=start)
        while True:
            for path, body in outbox.undelivered():
                self.server.upload(body)
                on_upload()
                outbox.delivered([path])
            if outbox.next_index >= until:
                return
            for index in [outbox.draw() for _ in range(self.ROUND)]:
                outbox.add(index, f"{index}:{next(self.server.ids)}".encode())


def indexes_of(worker: int, workers: int, until: int) -> list[int]:
    return [index for index in range(until) if index % workers == worker]


@pytest.mark.parametrize(("worker", "workers"), [(0, 1), (0, 3), (2, 3)])
class TestCrashes:
    def test_one_at_each_operation(self, tmp_path: Path, fuse: Any, worker: int, workers: int) -> None:
        """A crash after the n-th file operation or upload, for every n; then a process without one."""
        until = worker + workers * 6
        for number in count(1):
            server = Server()
            lives = Worker(tmp_path / str(number), server, worker=worker, workers=workers)
            survived = fuse.lives(number, lambda lives=lives: lives.live(until, on_upload=fuse.burn))
            lives.live(until)
            assert server.delivered(until) == indexes_of(worker, workers, until), f"after a crash at operation {number}"
            if survived:
                assert number > 40
                break

    @pytest.mark.parametrize("every", [9, 11, 17])
    def test_again_and_again(self, tmp_path: Path, fuse: Any, worker: int, workers: int, every: int) -> None:
        server = Server()
        lives = Worker(tmp_path, server, worker=worker, workers=workers)
        until, deaths = worker + workers * 9, 0
        while not fuse.lives(every, lambda: lives.live(until, on_upload=fuse.burn)):
            deaths += 1
            assert deaths < 200
        assert deaths > 3
        assert server.delivered(until) == indexes_of(worker, workers, until)


@pytest.mark.parametrize(
    ("start", "worker", "workers", "expected"), [(7, 0, 1, 7), (7, 0, 4, 8), (7, 3, 4, 7), (8, 3, 4, 11)]
)
def test_without_a_cursor_it_begins_at_its_first_index_from_start(
    tmp_path: Path, start: int, worker: int, workers: int, expected: int
) -> None:
    assert Outbox(tmp_path, worker=worker, workers=workers, start=start).next_index == expected


def test_a_problem_that_comes_after_later_ones_does_not_move_the_cursor_back(tmp_path: Path) -> None:
    """Regrouped problems do. They stay in the outbox, in the order in which they were drawn."""
    outbox = Outbox(tmp_path, worker=0, workers=1, start=0)
    later, _, earlier = (outbox.add(index, str(index).encode()) for index in (1000, 98, 2))
    outbox.delivered([later])
    again = Outbox(tmp_path, worker=0, workers=1, start=0)
    assert (again.next_index, [body for _, body in again.undelivered()]) == (1001, [b"2", b"98"])
    again.delivered([earlier])
    assert Outbox(tmp_path, worker=0, workers=1, start=0).next_index == 1001


def test_what_another_training_left_is_dropped(tmp_path: Path) -> None:
    """Its directory was deleted and begun again, or two trainings had it one after the other."""
    directory = tmp_path / "workers" / "0-of-1"
    old = Outbox(directory, worker=0, workers=1, start=0, lineage="old")
    for index in (0, 1):
        old.add(old.draw(), str(index).encode())
    old.refused(old.undelivered()[0][0])
    new = Outbox(directory, worker=0, workers=1, start=7, lineage="new")
    assert (new.next_index, new.undelivered(), count_refused(directory.parent)) == (7, [], 0)
    assert Outbox(directory, worker=0, workers=1, start=99, lineage="new").next_index == 7
    assert new.is_there
    shutil.rmtree(directory)
    assert not new.is_there
