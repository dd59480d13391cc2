"""What the scoring thread does for those who wait for it."""

import pytest

from ref_server.scoring.errands import Errands
from ref_server.scoring.reference import NotReady


class Fatal(Exception):
    pass


def fail(error: BaseException) -> None:
    raise error


def test_errands_are_run_in_their_order() -> None:
    errands, done = Errands(Fatal), []
    answers = [errands.ask(lambda number=number: done.append(number) or number) for number in range(3)]
    assert len(errands) == 3
    while errands.run_next():
        pass
    assert done == [answer.result(0) for answer in answers] == [0, 1, 2]


def test_an_error_belongs_to_who_asked() -> None:
    errands = Errands(Fatal)
    bad, good = errands.ask(lambda: fail(ValueError("mine"))), errands.ask(lambda: 1)
    assert errands.run_next() and errands.run_next()
    with pytest.raises(ValueError, match="mine"):
        bad.result(0)
    assert good.result(0) == 1


@pytest.mark.parametrize("error", [Fatal("lost"), SystemExit(), KeyboardInterrupt()])
def test_what_is_fatal_ends_the_thread_and_nobody_waits_for_ever(error: BaseException) -> None:
    errands = Errands(Fatal)
    waiting = [errands.ask(lambda: fail(error)), errands.ask(lambda: None), errands.ask(lambda: None)]
    waiting[1].cancel()
    with pytest.raises(type(error)):
        errands.run_next()
    errands.refuse_all()
    assert waiting[1].cancelled()
    for answer in (waiting[0], waiting[2]):
        with pytest.raises(NotReady, match="ended by an error"):
            answer.result(0)


def test_a_closed_door() -> None:
    errands = Errands(Fatal)
    before, gone = errands.ask(lambda: 1), errands.ask(lambda: 2)
    gone.cancel()
    errands.close()
    with pytest.raises(NotReady, match="shutting down"):
        errands.ask(lambda: 3)
    assert errands.run_next() and errands.run_next() and not errands.run_next()
    assert before.result(0) == 1
