"""Cores are shared out evenly and disjointly, among those that are worth a thread."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.host.cpus import (
    StageCpus,
    parse_cpu_bind,
    split_cpus,
    stage_cpus,
    usable_cpus,
)

CPU_SETS = st.sets(st.integers(0, 300), min_size=1)


@given(CPU_SETS, st.integers(1, 12))
def test_shares_are_disjoint_and_even_and_use_every_core(cpus: set[int], num_stages: int) -> None:
    shares = split_cpus(sorted(cpus), num_stages)
    assert len(shares) == num_stages
    if num_stages > len(cpus):
        assert not any(shares)
    else:
        assert list(itertools.chain(*shares)) == sorted(cpus)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(CPU_SETS, st.floats(0.01, 400))
def test_a_quota_leaves_no_more_cores_than_it_has_time_for_but_one(
    cpus: set[int], quota: float
) -> None:
    nowhere = Path("/nonexistent")
    assert usable_cpus(cpus, None, nowhere) == sorted(cpus)
    usable = usable_cpus(cpus, quota, nowhere)
    assert usable == sorted(cpus)[: len(usable)]
    assert len(usable) == min(len(cpus), max(1, int(quota)))


@pytest.mark.parametrize(
    ("siblings", "allowed", "expected"),
    [
        (["0,4", "1,5", "2,6", "3,7"], range(8), [0, 1, 2, 3]),
        (["0-1", "2-3", "4-5"], range(6), [0, 2, 4]),
        # The other thread of a core may be all that is left of it.
        (["0,4", "1,5", "2,6", "3,7"], {1, 4, 5}, [1, 4]),
        (["0", "1"], range(2), [0, 1]),
        (["0-7"], {3, 5}, [3]),
    ],
)
def test_each_core_counts_once_whatever_its_hardware_threads(
    tmp_path: Path, siblings: list[str], allowed: set[int], expected: list[int]
) -> None:
    for text in siblings:
        for cpus in parse_cpu_bind(text, 1, range(8)):
            for cpu in cpus:
                folder = tmp_path / f"cpu{cpu}/topology"
                folder.mkdir(parents=True)
                (folder / "thread_siblings_list").write_text(f"{text}\n", encoding="ascii")
    assert usable_cpus(allowed, None, tmp_path) == expected


@given(st.lists(st.sets(st.integers(0, 63), min_size=1), min_size=1, max_size=5))
def test_an_explicit_list_is_taken_as_it_is(parts: list[set[int]]) -> None:
    text = "|".join(",".join(map(str, part)) for part in parts)
    assert parse_cpu_bind(text, len(parts), range(64)) == [sorted(part) for part in parts]


def test_an_explicit_list_may_have_ranges() -> None:
    assert parse_cpu_bind("0-3|4-5,7", 2, range(8)) == [[0, 1, 2, 3], [4, 5, 7]]
    assert parse_cpu_bind("3, 0-1,1", 1, range(8)) == [[0, 1, 3]]


@pytest.mark.parametrize(
    "text", ["", "|", "0|", "fast", "3-1", "-1", "0--1", "0,", "1.5", "0\n", "²", "0;1", "9" * 99]
)
def test_what_is_no_list_is_called_so_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="is neither auto nor none nor a list") as raised:
        parse_cpu_bind(text, 1, range(8))
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["0", "0|1|2"])
def test_a_list_needs_a_part_for_each_stage(text: str) -> None:
    with pytest.raises(UsageError, match=r"is for . stages, --pipeline-parallel-size is 2"):
        parse_cpu_bind(text, 2, range(8))


@pytest.mark.parametrize(("text", "core"), [("0|2-5", 4), ("1|0-999999999", 4), ("7|0", 7)])
def test_a_core_that_is_not_there_is_named(text: str, core: int) -> None:
    message = f"may not use core {core}, only 0-3,9"
    with pytest.raises(UsageError, match=message):
        parse_cpu_bind(text, 2, {0, 1, 2, 3, 9})


def test_stages_keep_to_the_cores_of_this_process() -> None:
    here: Any = {"allowed": {7}, "cores": [7]}
    assert stage_cpus(1, None, "auto", **here) == [StageCpus([7], 1)]
    assert stage_cpus(1, 3, "auto", **here) == [StageCpus([7], 3)]
    assert stage_cpus(2, None, "auto", **here) == [StageCpus([], 1)] * 2
    assert stage_cpus(1, None, "none", **here) == [StageCpus([], 1)]
    assert stage_cpus(2, 2, "7|7", **here) == [StageCpus([7], 2)] * 2
    with pytest.raises(UsageError, match=r"may not use core 8, only 7$"):
        stage_cpus(1, None, "8", **here)


def test_none_has_the_threads_of_auto() -> None:
    here: Any = {"allowed": range(4), "cores": [0, 2]}
    assert stage_cpus(1, None, "auto", **here) == [StageCpus([0, 2], 2)]
    assert stage_cpus(1, None, "none", **here) == [StageCpus([], 2)]
