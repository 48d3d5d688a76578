"""The smallest limit on the way from a process's control group to the root counts."""

from pathlib import Path

import pytest

from headrace.pipeline.cpu_quota import cpu_quota


def quota_of(folder: Path, own_groups: str, files: dict[str, str]) -> float | None:
    """cpu_quota with such a /proc/self/cgroup, and these files below /sys/fs/cgroup."""
    (folder / "own").write_text(own_groups, encoding="utf-8")
    for name, text in files.items():
        file = folder / "mounts" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return cpu_quota(folder / "own", folder / "mounts")


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
def test_version_2(
    tmp_path: Path, own_groups: str, files: dict[str, str], expected: float | None
) -> None:
    assert quota_of(tmp_path, own_groups, files) == expected


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
def test_version_1(
    tmp_path: Path, mount: str, quotas: dict[str, int], expected: float | None
) -> None:
    files = {f"{mount}/{group}/cpu.cfs_quota_us": f"{quota}\n" for group, quota in quotas.items()}
    files |= {f"{mount}/{group}/cpu.cfs_period_us": "100000\n" for group in quotas}
    assert quota_of(tmp_path, V1, files) == expected


def test_without_control_groups_nothing_limits(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "none", tmp_path) is None
