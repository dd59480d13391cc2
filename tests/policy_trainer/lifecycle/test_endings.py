"""Ctrl-C between steps, and a second one at once."""

import signal

import pytest

from policy_trainer.lifecycle.endings import Stopped, StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_asks_and_the_second_stops(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop
        stop.check()
        signal.raise_signal(number)
        assert stop
        with pytest.raises(Stopped):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_can_be_set_by_hand() -> None:
    stop = StopRequest()
    stop.set()
    with pytest.raises(Stopped):
        stop.check()
