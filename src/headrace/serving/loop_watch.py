"""A watch over the event loop: says which callback kept it from everybody else, and where.

A debug mode, which the tests of the server run in. What counts is never how long something took by
the clock, which on a busy machine says nothing, but what a thread did meanwhile:

- busy: one callback, or step of a task, used more than BOUND_S of CPU time;
- asleep: one callback waited for so long (a sleep, a lock, a socket) while no other thread of the
  process had anything to compute or to read from a disk, so that it did not wait for those;
- held: some thread used so much CPU time without letting others into the interpreter. That, too, is
  one that lets go of it again and again, each time sooner than after a switch interval, and is
  faster than they are to take it again.

It does not see a wait for the disk, nor one for a thread that computes, nor a thread that sleeps
without letting others into the interpreter.
"""

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_log = logging.getLogger(__name__)

BOUND_S = 0.25
# Seconds between two looks, which need the interpreter.
_NAP_S = 0.02
# How often the watch has to be given a core until others know that it waits for the interpreter.
_WAKES_TO_ASK = 4
# How the lines of the log begin that tests look for.
STOOD_STILL = "the event loop stood still"
_THREADS = Path("/proc/self/task")


async def watched(
    main: Coroutine[object, object, None], report: Callable[[str], None] = _log.error
) -> None:
    """Run main with an eye on the loop that runs it. report: told each standstill, in one line."""
    loop = asyncio.get_running_loop()
    base = loop.create_future()
    # The frame from which the loop calls back: what a callback is doing lies above it.
    loop.call_soon(lambda: base.set_result(sys._getframe(1)))
    watch = _Watch(loop, await base, report)
    watch.start()
    try:
        await main
    finally:
        watch.stop.set()
        watch.join()


@dataclass
class _Stretch:
    """Looks in a row at which the loop was in one callback.

    root: the callback's outermost frame. place: frame and instruction that it is at. begun, seen:
    CPU time in seconds of the loop's thread at the first look and at the last. asleep: looks at
    which it slept, and nothing that it might wait for was running. told: it was reported.
    """

    root: FrameType
    place: tuple[FrameType, int]
    begun: float
    seen: float
    asleep: int = 0
    told: bool = False


class _Watch(threading.Thread):
    """Made on the loop's thread. base: the frame from which the loop calls back."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, base: FrameType, report: Callable[[str], None]
    ) -> None:
        super().__init__(name="headrace-loop-watch", daemon=True)
        self.stop = threading.Event()
        self._loop = loop
        self._base = base
        self._report = report
        self._loop_ident = threading.get_ident()
        self._loop_native = threading.get_native_id()
        # Whether the loop has been through all that was ready when this was last cleared.
        self._turned = threading.Event()
        self._turned.set()

    def run(self) -> None:
        stretch = None
        with open(_THREADS / str(threading.get_native_id()) / "schedstat", "rb") as own:
            while not self.stop.is_set():
                delayed = _delay(own.fileno())
                # Nothing between these lets other threads in but the nap, so that who is busy in it
                # for long did not let this one in again.
                before = {thread: _used(thread.native_id) for thread in threading.enumerate()}
                time.sleep(_NAP_S)
                used = {thread: _used(thread.native_id) for thread in before}
                late = _lateness(delayed, _delay(own.fileno()))
                for thread in before:
                    if used[thread] - before[thread] - late > BOUND_S:
                        self._report_hold(thread, used[thread] - before[thread])
                stretch = self._look(stretch)

    def _look(self, last: _Stretch | None) -> _Stretch | None:
        """What the loop is in now, None between callbacks. last: what it was in."""
        innermost = sys._current_frames().get(self._loop_ident)
        now = _used(self._loop_native)
        turned = self._turned.is_set()
        if turned:
            self._turned.clear()
            self._loop.call_soon_threadsafe(self._turned.set)
        frames = _frames_above(self._base, innermost)
        if innermost is None or not frames:
            return None
        place = (innermost, innermost.f_lasti)
        # A task's outermost frame is the same at each of its steps: it is one step as long as the
        # loop has not turned.
        if last is None or turned or last.root is not frames[0]:
            return _Stretch(frames[0], place, now, now)
        # A thread that waits to be let into the interpreter wakes up all the while, which costs it
        # something: whoever used nothing at all is asleep.
        if (place, now) == (last.place, last.seen):
            last.asleep += self._sleeps_alone()
        last.place, last.seen = place, now
        busy, asleep = now - last.begun, last.asleep * _NAP_S
        if max(busy, asleep) > BOUND_S and not last.told:
            last.told = True
            task = asyncio.current_task(self._loop)
            who = "a callback" if task is None else f"task {task.get_name()}"
            what = f"used {busy:.3f} s of CPU time" if busy > asleep else f"slept {asleep:.3f} s"
            self._report(f"{STOOD_STILL}: {who} {what} up to {_written(frames)}")
        return last

    def _report_hold(self, thread: threading.Thread, seconds: float) -> None:
        frames = _frames_above(None, sys._current_frames().get(thread.ident or 0))
        self._report(
            f"{STOOD_STILL}: thread {thread.name} let nobody else into the interpreter for "
            f"{seconds:.3f} s of CPU time, which ended before {_written(frames)}"
        )

    def _sleeps_alone(self) -> bool:
        """Whether the loop's thread sleeps, and no other thread computes or reads from a disk."""
        own = threading.get_native_id()
        states = {thread: _state(thread) for thread in _threads() if thread != own}
        return states.pop(self._loop_native, "") == "S" and not {"R", "D"} & set(states.values())


def _frames_above(base: FrameType | None, innermost: FrameType | None) -> list[FrameType]:
    """Outermost first, without base and what lies below it; all, if base is not among them."""
    frames = []
    frame = innermost
    while frame is not None and frame is not base:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _written(frames: list[FrameType]) -> str:
    return " > ".join(
        f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        for frame in frames
    )


def _threads() -> list[int]:
    return [int(name) for name in os.listdir(_THREADS)]


def _used(thread: int | None) -> float:
    """CPU time in seconds of a thread by its native id, 0 if it has ended or not begun.

    The clock's number is what pthread_getcpuclockid() gives, which must not be asked about a thread
    that has ended. Source: include/linux/posix-timers_types.h of Linux.
    """
    try:
        return 0.0 if thread is None else time.clock_gettime(~thread << 3 | 6)
    except OSError:
        return 0.0


def _delay(schedstat: int) -> tuple[float, int]:
    """Seconds for which a thread that could have run had no core, and how often it got one.

    Source: sched-stats.rst of Linux.
    """
    _, waited, times = os.pread(schedstat, 100, 0).split()
    return int(waited) / 1e9, int(times)


def _lateness(before: tuple[float, int], now: tuple[float, int]) -> float:
    """For how many seconds the watch had not yet asked for the interpreter for want of a core.

    Asking takes it a few wake-ups, of which each may come late; all that follow are for looking
    whether it may enter.
    """
    waited, times = now[0] - before[0], now[1] - before[1]
    return waited * min(1.0, _WAKES_TO_ASK / max(1, times))


def _state(thread: int) -> str:
    """R, S, D and so on; empty if it has ended. Source: proc_pid_stat(5)."""
    try:
        return (_THREADS / str(thread) / "stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""
