"""How much memory this machine still has, and a process of it."""

import os
from pathlib import Path

from headrace.host.control_groups import killed_for_memory, memory_left


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
