"""Ranks: the processes of a pipeline. Each is a stage and a shard of it."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

_T = TypeVar("_T")
# First and end of what is taken of something.
Range = tuple[int, int]


class Ranks(msgspec.Struct, frozen=True, array_like=True):
    """How many there are, and how they are numbered: the shards of a stage side by side.

    Costs and plans are those of stages; whatever means a process names a rank. Without tensor
    parallelism a stage has one shard, and both numbers are the same.
    """

    num_stages: int
    num_shards: int = 1

    @property
    def count(self) -> int:
        """Ranks in all."""
        return self.num_stages * self.num_shards

    @property
    def sampler(self) -> int:
        """The rank that chooses tokens: the first shard of the last stage."""
        return self.number(self.num_stages - 1)

    def number(self, stage: int, shard: int = 0) -> int:
        """The rank of a stage's shard."""
        return stage * self.num_shards + shard

    def stage_of(self, rank: int) -> int:
        """The stage that the rank belongs to."""
        return rank // self.num_shards

    def shard_of(self, rank: int) -> int:
        """Which shard of its stage the rank is."""
        return rank % self.num_shards

    def by_stage(self, of_ranks: Sequence[_T]) -> list[Sequence[_T]]:
        """What each rank has, in rank order, put together by stage."""
        return [
            of_ranks[first : first + self.num_shards]
            for first in range(0, self.count, self.num_shards)
        ]

    def name(self, rank: int) -> str:
        """What people call the rank: its stage, and its shard where a stage has several."""
        stage = f"stage {self.stage_of(rank)}"
        return stage if self.num_shards == 1 else f"{stage} shard {self.shard_of(rank)}"


def dealt(size: int, shard: int, count: int, unit: int = 1) -> Range:
    """The part of a width that a shard of so many has, as even as whole units make it; the last
    unit may be a smaller one. Later shards have more: the first has work of its own."""
    units = -(-size // unit)
    return min(size, units * shard // count * unit), min(size, units * (shard + 1) // count * unit)
