"""Shards of a stage on several hosts: sums are those of one host, and who is gone is named."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from headrace.kernels.exchange import Exchange
from headrace.kernels.path import has_native
from headrace.pipeline.links import LinkError
from headrace.pipeline.shard_meeting import ShardMeeting
from headrace.protocol.messages import HostLinks
from headrace.protocol.ranks import Ranks

pytestmark = pytest.mark.skipif(not has_native(), reason="native kernels were not built")
_T = TypeVar("_T")
# One on each; two on the second; two on each, in turn.
LAYOUTS = [(0, 1), (0, 1, 1), (0, 1, 0, 1)]


@dataclass
class Shard:
    meeting: ShardMeeting
    exchange: Exchange = field(default_factory=Exchange)


def at_once(work: Callable[[Shard], _T], shards: Sequence[Shard]) -> list[_T]:
    with ThreadPoolExecutor(len(shards)) as threads:
        return list(threads.map(work, shards))


@contextmanager
def apart(nodes: Sequence[int], encrypted: bool = True) -> Iterator[list[Shard]]:
    """The shards of one stage, on these hosts, all of which are loopback."""
    ranks = Ranks(1, len(nodes))
    how = HostLinks(list(nodes), "127.0.0.1", bytes(32), encrypted)
    # Not tmp_path: a socket's path must be short.
    with tempfile.TemporaryDirectory() as folder:
        shards = [
            Shard(ShardMeeting(rank, ranks, Path(folder), 0, how)) for rank in range(ranks.count)
        ]
        listening = [edge for shard in shards for edge in shard.meeting.listening]

        def join(shard: Shard) -> None:
            own = [edge for edge in listening if edge.source == shards.index(shard)]
            shard.meeting.join(shard.exchange, own, 20.0, lambda: None, spin_s=200e-6, wait_s=20.0)

        at_once(join, shards)
        yield shards
        for shard in shards:
            shard.meeting.leave()


@pytest.mark.parametrize("nodes", LAYOUTS)
@pytest.mark.parametrize("encrypted", [True, False])
def test_all_have_the_sum_in_the_shards_order(nodes: tuple[int, ...], encrypted: bool) -> None:
    # More than a round holds, and then rounds that follow at once.
    sizes = [700_001, *range(1, 300)]
    parts = [[torch.randn(size) for size in sizes] for _ in nodes]
    sums = [[part.clone() for part in own] for own in parts]

    def add_up(shard: Shard) -> None:
        for own in sums[shards.index(shard)]:
            shard.exchange.all_reduce(own)

    with apart(nodes, encrypted) as shards:
        at_once(add_up, shards)
    for number, first in enumerate(parts[0]):
        expected = first
        for own in parts[1:]:
            expected = expected + own[number]
        assert all(torch.equal(own[number], expected) for own in sums)


@pytest.mark.parametrize("nodes", LAYOUTS)
def test_parts_are_gathered_by_the_first_or_by_all(nodes: tuple[int, ...]) -> None:
    widths = [7 + 300_000 * (shard == 1) for shard in range(len(nodes))]
    parts = [torch.randn(3, width) for width in widths]
    outs = [torch.zeros(3, sum(widths)) for _ in nodes]
    whole = torch.randn(500_003)
    wholes = [torch.zeros(len(whole)) for _ in nodes]

    def gather(shard: Shard) -> None:
        number = shards.index(shard)
        for _ in range(3):
            shard.exchange.gather(parts[number], widths, outs[number])
            own = shard.exchange.part_of(whole).clone()
            shard.exchange.gather_parts(own, wholes[number])

    with apart(nodes) as shards:
        at_once(gather, shards)
    assert torch.equal(outs[0], torch.cat(parts, dim=1))
    assert not any(out.any() for out in outs[1:])
    assert all(torch.equal(own, whole) for own in wholes)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_shard_that_is_gone_ends_the_wait_of_all_others(gone: int) -> None:
    def add_up(shard: Shard) -> str:
        if shards.index(shard) == gone:
            shard.meeting.give_up()
            return ""
        with pytest.raises(LinkError) as raised:
            shard.exchange.all_reduce(torch.ones(3))
        # Whoever waited for it through this one learns of it when this one goes.
        shard.meeting.give_up()
        return str(raised.value)

    with apart((0, 1, 1)) as shards:
        said = at_once(add_up, shards)
    assert any(f"stage 0 shard {gone}" in each for each in said)


def test_what_was_given_last_still_arrives_when_a_shard_leaves_in_order() -> None:
    for _ in range(20):
        with apart((0, 1)) as shards:
            sums = [torch.full((1000,), shard + 1.0) for shard in range(2)]

            def add_up(shard: Shard, sums: list[torch.Tensor] = sums) -> None:
                shard.exchange.all_reduce(sums[shards.index(shard)])
                shard.meeting.leave()

            at_once(add_up, shards)
            assert all(torch.equal(own, torch.full((1000,), 3.0)) for own in sums)
