"""Ctrl-C and SIGTERM between steps, and a second Ctrl-C at once."""

import io
import signal
import threading

import pytest

from policy_trainer.processes.lifecycle.endings import Stopped, StopRequest, signals_deferred


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_requests_a_stop_and_a_second_ctrl_c_stops(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop
        stop.check()
        signal.raise_signal(number)
        assert stop
        with pytest.raises(Stopped):
            stop.check()
        signal.raise_signal(signal.SIGTERM)  # no matter how often: torchrun and Slurm each send one
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) is before


def test_another_thread_handles_no_signals() -> None:
    before, during = signal.getsignal(signal.SIGINT), []

    def run() -> None:
        with StopRequest() as stop:
            during.append(signal.getsignal(signal.SIGINT))
            stop.set()
            during.append(bool(stop))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert during == [before, True]


def test_a_stop_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    monkeypatch.setattr("sys.stderr", output)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop
    assert "stopping; press Ctrl-C again" in output.getvalue()


def test_a_deferred_signal_is_handled_as_it_would_have_been() -> None:
    with StopRequest() as stop:
        with signals_deferred():
            signal.raise_signal(signal.SIGTERM)
            assert not stop
        assert stop
        with pytest.raises(KeyboardInterrupt), signals_deferred():
            signal.raise_signal(signal.SIGINT)
