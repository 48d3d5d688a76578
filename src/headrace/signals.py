"""Signals that end a command, from its first moment to its last.

A command that is ended before it has done its work exits with 128 and the signal's number, as
shells tell it of one that died of the signal itself.
"""

import os
import signal
import sys
from collections.abc import Callable
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


class EndingSignals:
    """Gathers the signals, and interrupts nothing. numbers: those that came, in order."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._listener: Callable[[], object] = lambda: None
        on_ending_signals(self._take)

    def tell(self, listener: Callable[[], object]) -> None:
        """Call the listener at each from now on, in the main thread between any two of its
        instructions; and now if there were any."""
        self._listener = listener
        if self.numbers:
            listener()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.numbers.append(number)
        self._listener()
