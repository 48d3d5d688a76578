"""How much memory this machine still has, and a process of it."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.host.control_groups import killed_for_memory, memory_left

# Of mallopt, in glibc's malloc.h.
_MMAP_THRESHOLD = -3


def free_memory() -> int:
    """Bytes that this machine still has, and every control group that this process is in."""
    free = 1 << 62
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    allowed = memory_left()
    return free if allowed is None else min(free, allowed)


def memory_of(process: int) -> int | None:
    """Bytes in memory of a process alone, without pages of files; None if it has ended (Linux:
    Documentation/filesystems/proc.rst, statm)."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
    except OSError:
        return None
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def kills_for_memory() -> int:
    """How many processes the system has ended so far because there was no memory left: of this
    process's control groups, or of the whole machine where those do not tell (Linux: mm/vmstat.c,
    oom_kill)."""
    kills = killed_for_memory()
    if kills is not None:
        return kills
    lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Meanwhile the system has memory back as soon as it is freed, in pieces of 128 KiB or more.

    Otherwise glibc keeps such pieces, and what is allocated between them holds them in place: a
    model that is loaded matrix by matrix would leave holes of half its size (man 3 mallopt,
    M_MMAP_THRESHOLD). Elsewhere nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    mallopt(_MMAP_THRESHOLD, 1 << 17)
    try:
        yield
    finally:
        # As far as glibc would have raised it by itself: steps free and allocate all the time.
        mallopt(_MMAP_THRESHOLD, 32 << 20)
