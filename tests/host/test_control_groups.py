"""The smallest limit on the way from a process's control group to the root counts."""

from pathlib import Path

import pytest

from headrace.host.control_groups import cpu_quota, killed_for_memory, memory_left


def write(folder: Path, own_groups: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Such a /proc/self/cgroup, and a folder with these files for /sys/fs/cgroup."""
    (folder / "own").write_text(own_groups, encoding="utf-8")
    for name, text in files.items():
        file = folder / "mounts" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder / "own", folder / "mounts"


V1 = "5:memory:/m\n4:cpu,cpuacct:/a/b\n3:cpuset:/\n0::/\n"


@pytest.mark.parametrize(
    ("own_groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "350000 100000\n", "a/cpu.max": "max 100000\n"}, 3.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "25000 50000\n"}, 0.5),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 50000\n", "a/cpu.max": "300000 100000\n"}, 2.0),
        # A container that sees its own group as the root.
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/../../elsewhere\n", {"cpu.max": "150000 100000\n"}, 1.5),
        # Another group's limit does not count.
        ("0::/a\n", {"b/cpu.max": "100000 100000\n", "a/b/cpu.max": "100000 100000\n"}, None),
        ("0::/a\n", {"unified/a/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/a:b\n", {"a:b/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/a\n", {"a/cpu.max": "of another kind\n"}, None),
        ("", {"cpu.max": "100000 100000\n"}, None),
    ],
)
def test_quotas_of_version_2(
    tmp_path: Path, own_groups: str, files: dict[str, str], expected: float | None
) -> None:
    assert cpu_quota(*write(tmp_path, own_groups, files)) == expected


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({"a/b": -1, "a": -1, ".": -1}, None),
        ({"a/b": 250_000, "a": -1, ".": -1}, 2.5),
        ({"a/b": 250_000, "a": 150_000, ".": -1}, 1.5),
        # A container that is told the host's path, which it does not see.
        ({".": 400_000}, 4.0),
        ({"a/b/c": 50_000, "b": 50_000}, None),
    ],
)
def test_quotas_of_version_1(
    tmp_path: Path, mount: str, quotas: dict[str, int], expected: float | None
) -> None:
    files = {f"{mount}/{group}/cpu.cfs_quota_us": f"{quota}\n" for group, quota in quotas.items()}
    files |= {f"{mount}/{group}/cpu.cfs_period_us": "100000\n" for group in quotas}
    assert cpu_quota(*write(tmp_path, V1, files)) == expected


def memory_v2(group: str, limit: str, used: int, **statistics: int) -> dict[str, str]:
    lines = "".join(f"{name} {number}\n" for name, number in statistics.items())
    return {
        f"{group}/memory.max": f"{limit}\n",
        f"{group}/memory.current": f"{used}\n",
        f"{group}/memory.stat": lines,
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (memory_v2("a/b", "max", 70), None),
        (memory_v2("a/b", "100", 70), 30),
        # Pages of files are dropped when memory is needed, shared memory is not.
        (memory_v2("a/b", "100", 70, anon=5, file=60, inactive_file=40, active_file=20), 90),
        (memory_v2("a/b", "100", 70, shmem=60, inactive_anon=60), 30),
        # The numbers change while they are read.
        (memory_v2("a/b", "100", 70, inactive_file=80), 100),
        (memory_v2("a/b", "100", 120), 0),
        (memory_v2("a/b", "100", 10) | memory_v2("a", "80", 70, active_file=30), 40),
        (memory_v2("a/b", "100", 10) | memory_v2(".", "80", 70), 10),
        (memory_v2("a/c", "100", 70), None),
        ({"a/b/memory.max": "100\n"}, None),
        ({**memory_v2("a/b", "100", 70), "a/b/memory.stat": "of another kind"}, 30),
    ],
)
def test_memory_of_version_2(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    assert memory_left(*write(tmp_path, "0::/a/b\n", files)) == expected


# What the kernel says where there is none.
NO_LIMIT = 9223372036854771712


def memory_v1(group: str, limit: int, used: int, **statistics: int) -> dict[str, str]:
    # Without the groups below: not what counts.
    lines = "cache 1000\ninactive_file 1000\nactive_file 1000\n"
    lines += "".join(f"{name} {number}\n" for name, number in statistics.items())
    return {
        f"memory/{group}/memory.limit_in_bytes": f"{limit}\n",
        f"memory/{group}/memory.usage_in_bytes": f"{used}\n",
        f"memory/{group}/memory.stat": lines,
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (memory_v1("m", 100, 70), 30),
        (memory_v1("m", 100, 70, total_inactive_file=40, total_active_file=20), 90),
        (memory_v1("m", NO_LIMIT, 70) | memory_v1(".", 100, 90), 10),
        # A container that sees its own group as the root, in one that has a limit.
        (memory_v1(".", NO_LIMIT, 70, hierarchical_memory_limit=100), 30),
        (memory_v1(".", 100, 70, hierarchical_memory_limit=NO_LIMIT), 30),
    ],
)
def test_memory_of_version_1(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert memory_left(*write(tmp_path, V1, files)) == expected


def test_without_a_limit_in_version_1_far_more_is_left_than_any_machine_has(tmp_path: Path) -> None:
    left = memory_left(*write(tmp_path, V1, memory_v1("m", NO_LIMIT, 70)))
    assert left is not None
    assert left > 2**60


def test_without_control_groups_nothing_limits(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "none", tmp_path) is None
    assert memory_left(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(
    ("own_groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.events": "max 7\noom 3\noom_kill 2\n"}, 2),
        # Others' in the groups around it do not count.
        ("0::/a/b\n", {"a/memory.events": "oom_kill 9\n", "a/b/memory.events": "oom_kill 2\n"}, 2),
        ("5:memory:/m\n", {"memory/m/memory.oom_control": "under_oom 0\noom_kill 4\n"}, 4),
        ("0::/a\n", {"b/memory.events": "oom_kill 1\n"}, None),
        ("", {}, None),
    ],
)
def test_processes_of_the_own_group_that_were_ended_for_want_of_memory(
    tmp_path: Path, own_groups: str, files: dict[str, str], expected: int | None
) -> None:
    assert killed_for_memory(*write(tmp_path, own_groups, files)) == expected
