"""How much memory this machine still has."""

from pathlib import Path

from headrace.host.control_groups import memory_left


def free_memory() -> int:
    """Bytes that this machine still has, and every control group that this process is in."""
    free = 1 << 62
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    allowed = memory_left()
    return free if allowed is None else min(free, allowed)
