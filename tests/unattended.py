"""For long runs that nobody watches: they end in time, and end what they have started."""

import faulthandler
import signal
import sys
from types import FrameType
from typing import NoReturn

from headrace.signals import on_ending_signals, unwind

# For context managers to end what is theirs, before the process ends without them.
_UNWIND_S = 120


def end_in_time(seconds: float) -> None:
    """Unwind at SIGINT, SIGTERM and SIGHUP; and after so many seconds, with exit code 1, once each
    thread's stack was written to standard error. To be called in the main thread."""
    on_ending_signals(unwind)
    signal.signal(signal.SIGALRM, _too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + _UNWIND_S, exit=True)


def _too_late(number: int, frame: FrameType | None) -> NoReturn:
    faulthandler.dump_traceback()
    sys.exit("WRONG: it did not end in time; above is where it was")
