"""Signals that end a command, from its first moment to its last.

A command that is ended before it has done its work exits with 128 and the signal's number, as
shells tell it of one that died of the signal itself.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import NoReturn

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# As nohup has it.
_HANGUP_IGNORED = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def on_ending_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Handle SIGINT, SIGTERM and SIGHUP so from now on; the last one not if it was ignored when
    the program began."""
    for number in _ENDING:
        if number != signal.SIGHUP or not _HANGUP_IGNORED:
            signal.signal(number, handler)


def exit_code(number: int) -> int:
    """Of a command that a signal has ended."""
    return 128 + number


def exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """For as long as there is nothing to clean up: no exception runs through half-made modules."""
    os._exit(exit_code(number))


def unwind(number: int, frame: FrameType | None) -> NoReturn:
    """End the stages on the way out, which a second signal cannot stop."""
    on_ending_signals(signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(exit_code(number))


def unwinding() -> list[int]:
    """The signals that unwind, as things stand: they raise between any two instructions."""
    return [number for number in _ENDING if signal.getsignal(number) == unwind]


class EndingSignals:
    """Gathers the signals, and interrupts nothing. numbers: those that came, in order."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._listener: Callable[[], object] = lambda: None

    def tell(self, listener: Callable[[], object]) -> None:
        """Call the listener at each from now on, in the main thread between any two of its
        instructions; and now if there were any."""
        self._listener = listener
        if self.numbers:
            listener()

    def take(self, number: int, frame: FrameType | None) -> None:
        """The handler of a signal that is to be gathered."""
        self.numbers.append(number)
        self._listener()


@contextmanager
def put_off(numbers: Iterable[int] = _ENDING) -> Iterator[EndingSignals]:
    """Meanwhile gather these signals instead of what is done about them, which is done afterwards.

    So nothing raises in the middle of what would be lost half made: a process or a socket that
    nobody knows yet. Not for long: the user waits for it. Threads beside the main one need no such
    thing, since no handler runs there; nothing changes for them. Nor for a signal without a handler
    of Python's.
    """
    gathered = EndingSignals()
    handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
    try:
        with ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                for number in numbers:
                    handler = signal.getsignal(number)
                    if callable(handler):
                        handlers[number] = handler
                        # Before it is replaced: a handler that raises may run in between.
                        stack.callback(signal.signal, number, handler)
                        signal.signal(number, gathered.take)
            yield gathered
    finally:
        # Also in the place of an error, which may have come of the same moment.
        for number in gathered.numbers:
            handlers[number](number, None)
