"""Hosts that share a stage: every host has a shard, and a group counts for what it can do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.deployment.capacity import HostCapacity
from headrace.deployment.host_groups import (
    group_hosts,
    hosts_of_shards,
    joint_capacity,
    joint_links,
)
from headrace.errors import UsageError
from headrace.protocol.hosts import LinkFigures
from headrace.protocol.ranks import Ranks


@given(st.integers(1, 12), st.builds(Ranks, st.integers(1, 6), st.integers(1, 6)))
def test_every_host_has_a_shard_or_the_numbers_are_refused(hosts: int, ranks: Ranks) -> None:
    if hosts <= ranks.num_stages:
        assert group_hosts(hosts, ranks) == tuple((host,) for host in range(hosts))
        return
    if -(-hosts // ranks.num_stages) > ranks.num_shards:
        with pytest.raises(UsageError, match=f"{hosts} hosts for --pipeline-parallel-size"):
            group_hosts(hosts, ranks)
        return
    groups = group_hosts(hosts, ranks)
    assert [host for group in groups for host in group] == list(range(hosts))
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    for group in groups:
        by_shard = hosts_of_shards(group, ranks.num_shards)
        assert len(by_shard) == ranks.num_shards
        # Each host's are side by side, as cores are bound, and none is left out.
        assert list(dict.fromkeys(by_shard)) == list(group)
        assert sorted(by_shard) == by_shard


def test_a_group_is_as_fast_and_as_large_as_the_host_that_holds_it_up() -> None:
    slow = HostCapacity(name="slow", seconds=3.0, free=90)
    fast = HostCapacity(name="fast", seconds=1.0, free=30)
    # Of three shards, the second host has two.
    assert joint_capacity((0, 1), [slow, fast], 3) == HostCapacity(
        name="slow with fast", seconds=1.0, free=45
    )
    assert joint_capacity((1, 0), [slow, fast], 3).seconds == 2.0
    assert joint_capacity((0,), [slow, fast], 4) == slow


def test_between_groups_the_worst_line_counts_and_one_that_is_missing_ends_it() -> None:
    links = {
        (a, b): LinkFigures(latency_s=a + b, bytes_per_s=100.0 * (a + 1))
        for a in range(3)
        for b in range(3)
        if a != b
    }
    groups = [(0, 1), (2,)]
    assert joint_links(groups, links) == {
        (0, 1): LinkFigures(latency_s=3, bytes_per_s=100.0),
        (1, 0): LinkFigures(latency_s=3, bytes_per_s=300.0),
    }
    del links[1, 2]
    assert set(joint_links(groups, links)) == {(1, 0)}
    assert joint_links(groups, {}) == {}


def test_too_many_hosts_are_refused_by_numbers() -> None:
    with pytest.raises(UsageError, match=r"5 hosts for .* a stage would have 3 hosts"):
        group_hosts(5, Ranks(2, 2))
