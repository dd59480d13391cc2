"""Processes take turns on a device: one at a time, each in its turn, also when others are killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest

from policy_trainer.run_files.turns import DeviceTurns, in_turn
from tests.waiting import until

# A process that takes turns without end, and writes down when each began and ended.
_PLAYER = """
import sys, time
from pathlib import Path
from policy_trainer.run_files.turns import DeviceTurns

place, name, seconds, pause = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
with (place / f"{name}.log").open("a", buffering=1) as log:
    turns = DeviceTurns(place / "turns", lambda reason, waited: None)
    while True:
        with turns.turn():
            print("begin", time.monotonic(), file=log)
            time.sleep(seconds)
            print("end", time.monotonic(), file=log)
        time.sleep(pause)
"""


class Player:
    """Begins at once; `kill` ends it with SIGKILL."""

    def __init__(self, place: Path, name: str, *, seconds: float, pause: float = 0.0) -> None:
        self._log = place / f"{name}.log"
        arguments = [sys.executable, "-c", _PLAYER, str(place), name, str(seconds), str(pause)]
        self.process = subprocess.Popen(arguments)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def turns(self) -> list[tuple[float, float]]:
        """From and to. One that has not ended lasts until the process was killed, for which its beginning stands."""
        lines = [line.split() for line in self._log.read_text().splitlines()] if self._log.exists() else []
        times = [(word, float(moment)) for word, moment in lines]
        return [
            (begin, times[i + 1][1] if i + 1 < len(times) else begin)
            for i, (word, begin) in enumerate(times)
            if word == "begin"
        ]


@contextmanager
def playing(players: Sequence[Player]) -> Iterator[Sequence[Player]]:
    try:
        yield players
    finally:
        for player in players:
            player.kill()


def assert_no_overlap(players: Sequence[Player]) -> None:
    spans = sorted(span for player in players for span in player.turns())
    assert all(earlier[1] <= later[0] for earlier, later in pairwise(spans))


def never(reason: str, seconds: float) -> None:
    raise AssertionError(reason)


@pytest.fixture
def make_turns(tmp_path: Path) -> Iterator[Callable[..., DeviceTurns]]:
    made: list[DeviceTurns] = []

    def make(on_wait: Callable[[str, float], None] = lambda reason, seconds: None, **hooks) -> DeviceTurns:
        made.append(DeviceTurns(tmp_path / "turns", on_wait, **hooks))
        return made[-1]

    yield make
    for turns in made:
        turns.close()


@pytest.mark.slow
def test_a_trainer_and_three_workers_take_turns_and_nobody_starves(tmp_path: Path) -> None:
    names = ("trainer", "first", "second", "third")
    with playing([Player(tmp_path, name, seconds=0.05) for name in names]) as players:
        until(lambda: all(len(player.turns()) >= 5 for player in players))
        assert all(player.process.poll() is None for player in players)
    assert_no_overlap(players)


@pytest.mark.slow
@pytest.mark.parametrize("holds", [0.01, 5.0])
def test_the_others_go_on_when_one_is_killed(tmp_path: Path, holds: float) -> None:
    """In its turn, if it holds the device long; else at any moment, waiting or between two locks."""
    survivor = Player(tmp_path, "survivor", seconds=0.01)
    with playing([survivor]):
        for number in range(4):
            victim = Player(tmp_path, f"victim-{number}", seconds=holds)
            with playing([victim]):
                until(lambda victim=victim: len(victim.turns()) > 0)
                time.sleep(0.07 * number)
            before = len(survivor.turns())
            until(lambda before=before: len(survivor.turns()) > before + 1)


def test_the_device_is_kept_while_nobody_wants_it_and_let_go_when_somebody_does(
    make_turns: Callable[..., DeviceTurns],
) -> None:
    calls: list[str] = []
    mine = make_turns(never, begin=lambda: calls.append("begin"), end=lambda: calls.append("end"))
    for _ in range(3):
        with mine.turn():
            assert calls == ["begin"]
    with make_turns().turn():  # nobody calls mine meanwhile: its thread lets go
        assert calls == ["begin", "end"]


def test_a_block_is_not_interrupted(make_turns: Callable[..., DeviceTurns]) -> None:
    mine, other, order = make_turns(), make_turns(), []

    def wait() -> None:
        with other.turn():
            order.append("other")

    thread = threading.Thread(target=wait)
    with mine.turn():
        thread.start()
        time.sleep(0.3)
        order.append("mine")
    thread.join()
    assert order == ["mine", "other"]


def test_whoever_waits_is_next(make_turns: Callable[..., DeviceTurns]) -> None:
    """Also when the one who has the device asks again at once."""
    waits: list[str] = []
    mine, other, order = make_turns(), make_turns(lambda reason, seconds: waits.append(reason)), []

    def wait() -> None:
        with other.turn():
            order.append("other")

    thread = threading.Thread(target=wait)
    with mine.turn():
        thread.start()
        until(lambda: bool(waits))
    with mine.turn():
        order.append("mine")
    thread.join()
    assert order == ["other", "mine"] and set(waits) == {"its turn on the GPU"}


def test_who_waits_within_a_turn_gives_way(make_turns: Callable[..., DeviceTurns]) -> None:
    calls: list[str] = []
    mine = make_turns(begin=lambda: calls.append("begin"), end=lambda: calls.append("end"))
    other, waits = make_turns(lambda reason, seconds: waits.append(reason)), []

    def wait() -> None:
        with other.turn():
            calls.append("other")

    thread = threading.Thread(target=wait)
    with mine.turn():
        mine.give_way("a server", 1.0)
        assert calls == ["begin"]
        thread.start()
        until(lambda: bool(waits))
        mine.give_way("a server", 2.0)
        assert calls == ["begin", "end", "other", "begin"]
    thread.join()


def test_who_gives_up_leaves_nothing_locked(make_turns: Callable[..., DeviceTurns]) -> None:
    def stop(reason: str, seconds: float) -> None:
        raise InterruptedError(reason)

    mine, impatient = make_turns(), make_turns(stop)
    with mine.turn(), pytest.raises(InterruptedError, match="its turn on the GPU"), impatient.turn():
        pass
    with make_turns().turn():
        pass


def test_a_turn_that_cannot_begin_is_let_go_and_one_that_cannot_end_is_told(
    make_turns: Callable[..., DeviceTurns],
) -> None:
    def fail() -> None:
        raise ValueError("the engine")

    with pytest.raises(ValueError, match="the engine"), make_turns(begin=fail).turn():
        raise AssertionError
    sleepless = make_turns(end=fail)
    with sleepless.turn():
        pass
    with make_turns().turn():
        with pytest.raises(ValueError, match="the engine"), sleepless.turn():
            raise AssertionError
        sleepless.end = lambda: None


def test_a_directory_that_was_begun_again_has_turns_of_its_own(
    make_turns: Callable[..., DeviceTurns], tmp_path: Path
) -> None:
    mine = make_turns()
    with mine.turn():
        pass
    for file in (tmp_path / "turns").iterdir():
        file.unlink()
    (tmp_path / "turns").rmdir()
    with make_turns().turn():
        pass


def test_a_child_process_that_was_forked_in_a_turn_does_not_keep_the_device(
    make_turns: Callable[..., DeviceTurns], tmp_path: Path
) -> None:
    mine = make_turns()
    with mine.turn():
        child = os.fork()  # inherits the open files
        if not child:
            signal.pause()
    try:
        mine.close()
        with make_turns(never).turn():
            pass
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_without_turns_all_go_at_once() -> None:
    with in_turn(None), in_turn(None):
        pass
