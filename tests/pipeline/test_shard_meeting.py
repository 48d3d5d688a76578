"""Shards that are to share memory: who does not come is named, whatever it is that went wrong."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from headrace.kernels.exchange import Exchange
from headrace.kernels.path import has_native
from headrace.pipeline.links import Check, LinkError
from headrace.pipeline.local_door import LocalDoor
from headrace.pipeline.shard_meeting import ShardMeeting
from headrace.protocol.ranks import Ranks

pytestmark = pytest.mark.skipif(not has_native(), reason="native kernels were not built")
RANKS = Ranks(1, 2)


@pytest.fixture
def shards() -> Iterator[list[ShardMeeting]]:
    # Not tmp_path: a socket's path must be short.
    with tempfile.TemporaryDirectory() as folder:
        made = [ShardMeeting(rank, RANKS, Path(folder), 0, None) for rank in range(2)]
        yield made
        for each in made:
            each.leave()


def join(shards: list[ShardMeeting], rank: int, exchange: Exchange) -> None:
    peers = shards[0].listening
    shards[rank].join(exchange, peers, 20.0, lambda: None, spin_s=0.0, wait_s=20.0)


def test_they_add_up_in_the_memory_of_the_first(shards: list[ShardMeeting]) -> None:
    exchanges, parts = [Exchange(), Exchange()], [torch.ones(9), torch.full((9,), 2.0)]

    def add_up(rank: int) -> None:
        join(shards, rank, exchanges[rank])
        exchanges[rank].all_reduce(parts[rank])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(add_up, range(2)))
    assert all(torch.equal(part, torch.full((9,), 3.0)) for part in parts)


def test_a_first_shard_that_is_gone_is_named(shards: list[ShardMeeting]) -> None:
    shards[0].leave()
    with pytest.raises(LinkError, match="stage 0 shard 0"):
        join(shards, 1, Exchange())


def test_a_first_shard_that_goes_before_it_shares_its_memory_is_named(
    shards: list[ShardMeeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = LocalDoor.wait_for_peer

    def wait_and_go(door: LocalDoor, timeout_s: float, check: Check) -> NoReturn:
        wait(door, timeout_s, check).close()
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalDoor, "wait_for_peer", wait_and_go)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(join, shards, 0, Exchange())
        with pytest.raises(LinkError, match="stage 0 shard 0"):
            join(shards, 1, Exchange())
        assert isinstance(first.exception(), KeyboardInterrupt)


def test_a_shard_that_leaves_ends_the_others_wait(shards: list[ShardMeeting]) -> None:
    exchanges = [Exchange(), Exchange()]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: join(shards, rank, exchanges[rank]), range(2)))
    shards[1].leave()
    with pytest.raises(LinkError, match="stage 0 shard 1"):
        exchanges[0].all_reduce(torch.ones(3))
