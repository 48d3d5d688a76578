"""A rank that runs on this host once its weights are here, and speaks by its agent until then."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from headrace.errors import HeadraceError
from headrace.pipeline.rank_weights import RankLife
from headrace.protocol import codec
from headrace.protocol.cluster import StartRank
from headrace.protocol.messages import Failure, RankConfig


@dataclass
class AwaitedRank:
    """bodies: what the engine sent to its control socket, the first of them its config. told_at:
    when people were told last how far its weights are, on time.monotonic."""

    order: StartRank
    bodies: list[bytes] = field(default_factory=list)
    told_at: float = field(default_factory=time.monotonic)

    @property
    def whose(self) -> RankLife:
        """The process that is to start."""
        return RankLife(self.order.rank, self.order.life)

    @property
    def config(self) -> RankConfig:
        """As the engine sent it."""
        config = codec.decode_to_rank(self.bodies[0])
        assert isinstance(config, RankConfig)
        return config

    def bodies_with(self, model_path: str) -> Iterator[bytes]:
        """What its process is to be told, with where the model lies on this host."""
        yield codec.encode(msgspec.structs.replace(self.config, model_path=model_path))
        yield from self.bodies[1:]

    def failure(self, error: HeadraceError) -> Failure:
        """What it would say if it were there."""
        return Failure(
            epoch=self.config.epoch,
            rank=self.order.rank,
            kind=type(error).__name__,
            message=" ".join(str(error).split()),
            step=None,
            lost_peer=None,
            details="",
        )
