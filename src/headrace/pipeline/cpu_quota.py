"""How much processor time the control groups of this process allow."""

from pathlib import Path


def cpu_quota(
    own_groups: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """CPUs' worth of time a second that this process may use; None if nothing limits it.

    The smallest limit of the process's own group and of all groups around it, in versions 1 and 2
    of control groups (Linux: Documentation/admin-guide/cgroup-v2.rst and
    Documentation/scheduler/sched-bwc.rst). own_groups names the groups; mounts is where their files
    are.
    """
    try:
        lines = own_groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            read, roots = _limit_v2, [mounts, mounts / "unified"]
        elif "cpu" in controllers.split(","):
            read, roots = _limit_v1, [mounts / controllers, mounts / "cpu"]
        else:
            continue
        # A container sees its own group as the root, yet may be told the host's path to it, or one
        # that leads out of the root. Folders that are not there are passed over.
        below = [] if ".." in path.split("/") else path.strip("/").split("/")
        for root in roots:
            for depth in range(len(below) + 1):
                limits.append(read(root.joinpath(*below[:depth])))
    return min((limit for limit in limits if limit is not None), default=None)


def _limit_v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _limit_v1(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
        period = int((group / "cpu.cfs_period_us").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return None if quota < 0 else quota / period
