"""Signals that end a command: put off where they would leave something half made."""

import signal
import threading

import pytest

from headrace.signals import on_ending_signals, put_off, unwind


@pytest.fixture(autouse=True)
def _as_in_a_command() -> None:
    on_ending_signals(unwind)


def test_what_is_under_way_is_done_before_a_signal_unwinds() -> None:
    done = []

    @put_off()
    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done


def test_a_signal_counts_more_than_the_error_of_the_same_moment() -> None:

    @put_off()
    def fail() -> None:
        signal.raise_signal(signal.SIGTERM)
        raise ConnectionError

    with pytest.raises(SystemExit) as ended:
        fail()
    assert ended.value.code == 128 + signal.SIGTERM


def test_signals_that_nobody_raises_for_are_handled_afterwards_in_order() -> None:
    came: list[int] = []
    on_ending_signals(lambda number, _: came.append(number))
    with put_off():
        with put_off():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
        assert came == []
    assert came == [signal.SIGTERM, signal.SIGINT]


def test_handlers_are_as_they_were_afterwards() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with put_off():
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) != unwind
    assert signal.getsignal(signal.SIGINT) == unwind
    assert signal.getsignal(signal.SIGTERM) == unwind


def test_threads_put_nothing_off() -> None:
    handlers = []

    def look() -> None:
        with put_off():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [unwind]
