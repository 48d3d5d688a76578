"""More hosts than stages: a stage has several, with some of its shards on each.

To whoever places stages, the hosts of a group are one, as fast as they are together.
"""

from collections.abc import Mapping, Sequence
from itertools import permutations, product

from headrace.deployment.capacity import HostCapacity
from headrace.errors import UsageError
from headrace.protocol.hosts import LinkFigures
from headrace.protocol.ranks import Ranks, dealt

# Numbers of hosts, in the order in which they have a stage's shards.
Group = tuple[int, ...]


def group_hosts(num_hosts: int, ranks: Ranks) -> tuple[Group, ...]:
    """As many hosts a stage as any other has, or one more; a group for each host where there are
    no more hosts than stages.

    Raises UsageError if a host would have nothing.
    """
    if num_hosts <= ranks.num_stages:
        return tuple((host,) for host in range(num_hosts))
    groups = tuple(
        tuple(range(*dealt(num_hosts, stage, ranks.num_stages)))
        for stage in range(ranks.num_stages)
    )
    most = max(map(len, groups))
    if most > ranks.num_shards:
        raise UsageError(
            f"{num_hosts} hosts for --pipeline-parallel-size {ranks.num_stages} and "
            f"--tensor-parallel-size {ranks.num_shards}: a stage would have {most} hosts, and each "
            "runs one shard at least"
        )
    return groups


def hosts_of_shards(group: Group, num_shards: int) -> list[int]:
    """By shard of a stage that the group runs."""
    counts = _shard_counts(group, num_shards)
    return [host for host, count in zip(group, counts, strict=True) for _ in range(count)]


def joint_capacity(group: Group, hosts: Sequence[HostCapacity], num_shards: int) -> HostCapacity:
    """What a group can do: the host that is slowest, or has least room, with its part counts."""
    members = [hosts[host] for host in group]
    counts = _shard_counts(group, num_shards)
    return HostCapacity(
        name=" with ".join(member.name for member in members),
        seconds=max(m.seconds * n / num_shards for m, n in zip(members, counts, strict=True)),
        free=min(m.free * num_shards // n for m, n in zip(members, counts, strict=True)),
    )


def joint_links(
    groups: Sequence[Group], links: Mapping[tuple[int, int], LinkFigures]
) -> dict[tuple[int, int], LinkFigures]:
    """Between groups, by their numbers: the worst of what their hosts have. links: between hosts;
    without one of them there is none."""
    joint = {}
    for ends in permutations(range(len(groups)), 2):
        sender, receiver = (groups[end] for end in ends)
        between = [links.get(hosts) for hosts in product(sender, receiver)]
        found = [link for link in between if link is not None]
        if found and len(found) == len(between):
            joint[ends] = LinkFigures(
                latency_s=max(link.latency_s for link in found),
                bytes_per_s=min(link.bytes_per_s for link in found),
            )
    return joint


def _shard_counts(group: Group, num_shards: int) -> list[int]:
    """By host of the group."""
    parts = (dealt(num_shards, at, len(group)) for at in range(len(group)))
    return [end - first for first, end in parts]
