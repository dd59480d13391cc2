"""Turns on a device: one process at a time, and the others go on when one is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from policy_trainer.rollout.device_turns import DeviceTurns, SamplerInTurns
from policy_trainer.rollout.sampling.sampler import SamplingParams
from tests.harness.processes import until

# A process that takes turns without end, and writes down when each began and ended.
_PLAYER = """
import sys, time
from pathlib import Path
from policy_trainer.rollout.device_turns import DeviceTurns

place, name, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
with (place / f"{name}.log").open("a", buffering=1) as log:
    turns = DeviceTurns(place / "turns", lambda reason, waited: None)
    while True:
        with turns.turn():
            print("begin", time.monotonic(), file=log)
            time.sleep(seconds)
            print("end", time.monotonic(), file=log)
"""


class Player:
    """Begins at once; SIGKILL ends it with the block."""

    def __init__(self, place: Path, name: str, *, seconds: float) -> None:
        self._log = place / f"{name}.log"
        self.process = subprocess.Popen([sys.executable, "-c", _PLAYER, str(place), name, str(seconds)])

    def __enter__(self) -> "Player":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def turns(self) -> list[tuple[float, float]]:
        """From and to. A turn that was killed has its beginning for its end."""
        lines = [line.split() for line in self._log.read_text().splitlines()] if self._log.exists() else []
        if not lines:
            return []
        times = [(word, float(moment)) for word, moment in lines]
        ends = [*(moment if word == "end" else None for word, moment in times[1:]), None]
        return [
            (begin, begin if end is None else end)
            for (word, begin), end in zip(times, ends, strict=True)
            if word == "begin"
        ]


def never(reason: str, seconds: float) -> None:
    raise AssertionError(reason)


Make = Callable[..., DeviceTurns]


@pytest.fixture
def make_turns(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def make(on_wait: Callable[[str, float], None] = lambda reason, seconds: None, **hooks) -> DeviceTurns:
            turns = DeviceTurns(tmp_path / "turns", on_wait, **hooks)
            stack.callback(turns.close)
            return turns

        yield make


@pytest.mark.slow
def test_a_trainer_and_three_workers_take_turns_and_nobody_starves(tmp_path: Path) -> None:
    with ExitStack() as stack:
        players = [
            stack.enter_context(Player(tmp_path, name, seconds=0.05))
            for name in ("trainer", "first", "second", "third")
        ]
        until(lambda: all(len(player.turns()) >= 5 for player in players))
        assert all(player.process.poll() is None for player in players)
    spans = sorted(span for player in players for span in player.turns())
    assert all(earlier[1] <= later[0] for earlier, later in pairwise(spans))


@pytest.mark.slow
@pytest.mark.parametrize("holds", [0.01, pytest.param(5.0, marks=pytest.mark.long)])
def test_the_others_go_on_when_one_is_killed(tmp_path: Path, holds: float) -> None:
    """In its turn, if it holds the device long; else at any moment, waiting or between two locks."""
    with Player(tmp_path, "survivor", seconds=0.01) as survivor:
        for number in range(4):
            with Player(tmp_path, f"victim-{number}", seconds=holds) as victim:
                until(lambda victim=victim: len(victim.turns()) > 0)
                time.sleep(0.07 * number)
            before = len(survivor.turns())
            until(lambda before=before: len(survivor.turns()) > before + 1)


def test_the_device_is_kept_until_another_process_wants_it(
    make_turns: Make,
) -> None:
    calls: list[str] = []
    mine = make_turns(never, begin=lambda: calls.append("begin"), end=lambda: calls.append("end"))
    for _ in range(3):
        with mine.turn():
            assert calls == ["begin"]
    with make_turns().turn():  # nobody calls mine meanwhile: its thread lets go
        assert calls == ["begin", "end"]


def in_thread(turns: DeviceTurns, calls: list[str]) -> threading.Thread:
    """Another process's turn, which is noted."""

    def take() -> None:
        with turns.turn():
            calls.append("other")

    return threading.Thread(target=take)


def test_the_process_that_waits_is_next(make_turns: Make) -> None:
    """Also when the process that has the device asks again at once."""
    waits, mine, order = [], make_turns(), []
    other = in_thread(make_turns(lambda reason, seconds: waits.append(reason)), order)
    with mine.turn():
        other.start()
        until(lambda: bool(waits))
    with mine.turn():
        order.append("mine")
    other.join()
    assert order == ["other", "mine"] and set(waits) == {"its turn on the GPU"}


def test_a_wait_within_a_turn_gives_way(make_turns: Make) -> None:
    calls, waits = [], []
    mine = make_turns(begin=lambda: calls.append("begin"), end=lambda: calls.append("end"))
    other = in_thread(make_turns(lambda reason, seconds: waits.append(reason)), calls)
    reported: list[tuple[str, float]] = []
    wait = mine.giving_way(lambda *about: reported.append(about))
    with mine.turn():
        wait("a server", 1.0)
        assert calls == ["begin"]
        other.start()
        until(lambda: bool(waits))
        wait("a server", 2.0)
        assert calls == ["begin", "end", "other", "begin"]
    other.join()
    assert reported == [("a server", 1.0), ("a server", 2.0)]


def test_errors_of_begin_and_end_are_raised(
    make_turns: Make,
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


def test_a_directory_that_was_begun_again_has_turns_of_its_own(make_turns: Make, tmp_path: Path) -> None:
    mine = make_turns()
    with mine.turn():
        pass
    for file in (tmp_path / "turns").iterdir():
        file.unlink()
    (tmp_path / "turns").rmdir()
    with make_turns().turn():
        pass


def test_a_child_process_that_was_forked_in_a_turn_does_not_keep_the_device(make_turns: Make, tmp_path: Path) -> None:
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


def test_a_running_batch_has_the_device_for_its_whole_block(make_turns: Make) -> None:
    waits, order = threading.Event(), list[str]()
    mine = make_turns(end=lambda: order.append("end"))
    other = make_turns(lambda reason, seconds: waits.set(), begin=lambda: order.append("other"))
    sampler: Any = SimpleNamespace(running_batch=lambda params, seed: nullcontext([params, seed]))
    params = SamplingParams(1, 1, 1.0)

    def take() -> None:
        with other.turn():
            pass

    thread = threading.Thread(target=take)
    with SamplerInTurns(sampler, mine).running_batch(params, 3) as batch:
        assert batch == [params, 3]
        thread.start()
        assert waits.wait(60)
        order.append("block")
    thread.join()
    assert order == ["block", "end", "other"]
