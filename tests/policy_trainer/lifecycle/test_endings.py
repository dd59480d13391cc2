"""Ctrl-C between steps, and a second one at once."""

import io
import signal
import threading

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


def test_another_thread_leaves_signals_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def run() -> None:
        with StopRequest() as stop:
            seen.append(signal.getsignal(signal.SIGINT))
            stop.set()
            seen.append(bool(stop))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before, True]


def test_a_stop_is_told_where_standard_error_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.StringIO()
    monkeypatch.setattr("sys.stderr", told)  # as in a notebook
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop
    assert "stopping; press Ctrl-C again" in told.getvalue()
