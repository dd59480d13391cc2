"""The workers' shares of a step: together they are its groups."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.rollout.outbox import Outbox
from policy_trainer.rollout.share import StepShare
from policy_trainer.weights.published.publication import Publication
from shared.api import State, Uploaded


def publication(version: int, next_index: int, groups: int) -> Publication:
    return Publication("r", 0, version, next_index=next_index, max_waiting=1, groups=groups)


@given(workers=st.integers(1, 5), start=st.integers(0, 20), groups=st.integers(0, 12))
def test_all_workers_together_sample_the_groups_of_a_step(workers: int, start: int, groups: int) -> None:
    wanted = publication(0, start, groups)
    shares = [StepShare(worker, workers).left(wanted, OUTBOX) for worker in range(workers)]
    firsts = [start + (worker - start) % workers for worker in range(workers)]
    drawn = [first + workers * n for first, share in zip(firsts, shares, strict=True) for n in range(share)]
    assert sorted(drawn) == [*range(start, start + groups)]


class _Empty:
    waiting = refusals = 0

    def begin_at(self, index: int) -> None:
        pass


OUTBOX: Outbox = _Empty()  # type: ignore[assignment]


def test_what_waits_from_an_earlier_process_is_uploaded_first(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, worker=1, workers=2, start=0)
    left = outbox.add(3, b"batch")
    share, wanted = StepShare(1, 2), publication(4, 6, 4)
    assert share.left(wanted, outbox) == 0
    outbox.delivered([left])
    assert share.left(wanted, outbox) == 2 and outbox.next_index == 7
    assert [outbox.draw(), outbox.draw()] == [7, 9]
    for body in (b"7", b"9"):
        share.add(body)
    assert share.left(wanted, outbox) == 0
    assert share.left(publication(4, 6, 6), outbox) == 1  # a lost one is asked for
    client: Any = Answers({b"7": State.LEASED, b"9": State.EXPIRED})
    share.upload_again(client)
    assert share.left(wanted, outbox) == 1 and outbox.next_index == 11
    share.upload_again(client)
    assert client.uploaded == [b"7", b"9", b"7"]
    assert share.left(replace(wanted, lineage="another"), outbox) == 2 and outbox.next_index == 7


def test_refused_files_may_be_deleted(tmp_path: Path) -> None:
    outbox, share = Outbox(tmp_path, worker=0, workers=1, start=0), StepShare(0, 1)
    outbox.refused(outbox.add(0, b"bad"))
    assert share.left(publication(1, 0, 1), outbox) == 1
    share.add(b"good")
    next(tmp_path.glob("*.refused")).unlink()
    assert share.left(publication(1, 0, 1), outbox) == 0


class Answers:
    def __init__(self, states: dict[bytes, State]) -> None:
        self.states = states
        self.uploaded: list[bytes] = []

    def upload(self, body: bytes) -> Uploaded:
        self.uploaded.append(body)
        return Uploaded(id="any", state=self.states[body], created=False)
