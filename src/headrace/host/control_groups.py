"""What the control groups of this process allow: processor time and memory.

The process's own group counts, and so do all groups around it, in versions 1 and 2 (Linux:
Documentation/admin-guide/cgroup-v2.rst, Documentation/admin-guide/cgroup-v1/memory.rst,
Documentation/scheduler/sched-bwc.rst).
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

_Number = TypeVar("_Number", int, float)

_OWN_GROUPS = Path("/proc/self/cgroup")
_MOUNTS = Path("/sys/fs/cgroup")


def cpu_quota(own_groups: Path = _OWN_GROUPS, mounts: Path = _MOUNTS) -> float | None:
    """CPUs' worth of time a second that this process may use; None if nothing limits it.

    own_groups names the process's groups; mounts is where their files are.
    """
    return _least("cpu", _quota_v1, _quota_v2, own_groups, mounts)


def memory_left(own_groups: Path = _OWN_GROUPS, mounts: Path = _MOUNTS) -> int | None:
    """Bytes that this process may still take; None if nothing limits it. Pages of files, which the
    system drops when memory is needed, are not taken."""
    return _least("memory", _memory_v1, _memory_v2, own_groups, mounts)


def killed_for_memory(own_groups: Path = _OWN_GROUPS, mounts: Path = _MOUNTS) -> int | None:
    """How many processes of the process's own group the system has ended so far for want of memory;
    None if it does not tell."""
    names = {1: "memory.oom_control", 2: "memory.events"}
    found = [
        _numbers(group / names[version]).get("oom_kill")
        for version, group in _groups("memory", own_groups, mounts)
    ]
    # The innermost comes last.
    return next((number for number in reversed(found) if number is not None), None)


def _least(
    controller: str,
    read_v1: Callable[[Path], _Number | None],
    read_v2: Callable[[Path], _Number | None],
    own_groups: Path,
    mounts: Path,
) -> _Number | None:
    """The smallest of what each group says."""
    found = [
        (read_v1 if version == 1 else read_v2)(group)
        for version, group in _groups(controller, own_groups, mounts)
    ]
    return min((number for number in found if number is not None), default=None)


def _groups(controller: str, own_groups: Path, mounts: Path) -> Iterator[tuple[int, Path]]:
    """Version and folder of each group that may limit what the controller controls; some of the
    folders may not be there."""
    try:
        lines = own_groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, roots = 2, [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            version, roots = 1, [mounts / controllers, mounts / controller]
        else:
            continue
        # A container sees its own group as the root, yet may be told the host's path to it, or one
        # that leads out of the root.
        below = [] if ".." in path.split("/") else path.strip("/").split("/")
        for root in roots:
            for depth in range(len(below) + 1):
                yield version, root.joinpath(*below[:depth])


def _quota_v2(group: Path) -> float | None:
    try:
        quota, period = _text(group / "cpu.max").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(group: Path) -> float | None:
    try:
        quota = int(_text(group / "cpu.cfs_quota_us"))
        period = int(_text(group / "cpu.cfs_period_us"))
    except (OSError, ValueError):
        return None
    return None if quota < 0 else quota / period


def _memory_v2(group: Path) -> int | None:
    try:
        limit = _text(group / "memory.max").strip()
        if limit == "max":
            return None
        used = int(_text(group / "memory.current"))
    except (OSError, ValueError):
        return None
    # Here, unlike in version 1, the numbers include the groups below.
    numbers = _numbers(group / "memory.stat")
    return _left(int(limit), used, numbers.get("inactive_file", 0) + numbers.get("active_file", 0))


def _memory_v1(group: Path) -> int | None:
    try:
        limit = int(_text(group / "memory.limit_in_bytes"))
        used = int(_text(group / "memory.usage_in_bytes"))
    except (OSError, ValueError):
        return None
    numbers = _numbers(group / "memory.stat")
    # Of the groups around it, those that a container does not see included.
    limit = min(limit, numbers.get("hierarchical_memory_limit", limit))
    cached = numbers.get("total_inactive_file", 0) + numbers.get("total_active_file", 0)
    return _left(limit, used, cached)


def _left(limit: int, used: int, cached: int) -> int:
    return max(0, limit - max(0, used - cached))


def _numbers(file: Path) -> dict[str, int]:
    """Of a file with a name and a number a line; none if it cannot be read."""
    try:
        lines = _text(file).splitlines()
        return {name: int(number) for name, number in map(str.split, lines)}
    except (OSError, ValueError):
        return {}


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")
