"""Edges between stages: what every backend's links have in common.

Every directed edge is a link of its own, so that nothing queues behind anything else. Starting a
send or a receive returns at once. A buffer must live, untouched, from the start of its transfer
until its wait returns: the ledger holds it so long. A wait that runs out of time, or whose peer is
gone, is a LinkError; the link is then dead at both ends, other transfers and later ones fail at
once, and the pipeline ends.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch

from headrace.pipeline.ledger import Channel, Handle, Tensors
from headrace.protocol.messages import LinkEmulation
from headrace.protocol.ranks import Ranks

# Seconds between two looks, in a wait for a peer, at whether it is still to go on.
LOOK_S = 0.05

# Called every LOOK_S or more often while a peer is waited for; may raise, which ends the wait.
Check = Callable[[], None]


class LinkError(Exception):
    """A transfer failed: the peer is gone, or did not do its part in time."""

    def __init__(self, message: str, peer: int) -> None:
        super().__init__(message)
        self.peer = peer


class Link(Protocol):
    """One stage's end of a directed edge."""

    def send(self, tensor: torch.Tensor) -> Handle:
        """Start sending a contiguous tensor; LinkError if the link is known to be dead."""

    def receive(self, buffer: torch.Tensor, watched: bool = True) -> Handle:
        """Start receiving into a contiguous buffer of the sender's shape and dtype.

        watched: its wait tells when it was complete. LinkError if the link is known to be dead.
        """


@dataclass(frozen=True)
class End:
    """What a stage calls its end of an edge, in errors."""

    channel: Channel
    incoming: bool
    ranks: Ranks

    @property
    def peer(self) -> int:
        return self.channel.source if self.incoming else self.channel.target

    def gone(self, error: BaseException) -> NoReturn:
        raise LinkError(f"{self}: the link is gone", self.peer) from error

    def late(self, timeout_s: float, error: BaseException | None = None) -> NoReturn:
        missing = "nothing came" if self.incoming else "it was not taken"
        raise LinkError(
            f"{self}: {missing} within {timeout_s:g} s (if a step may take that long, raise "
            "--stall-timeout)",
            self.peer,
        ) from error

    def __str__(self) -> str:
        doing = "waiting for" if self.incoming else "sending"
        towards = "from" if self.incoming else "to"
        return f"{doing} {self.channel.tensors} {towards} {self.ranks.name(self.peer)}"


@dataclass
class SlowLine:
    """When a message would be there if the line were as slow as the emulation says.

    As on a socket under gloo: the receiver's notice that it is ready takes the latency to reach the
    sender; then the bytes need their time on the line, one message after the other; and the latency
    once more.
    """

    emulation: LinkEmulation
    _free_at: float = 0.0

    def arrival(self, posted_at: float, here_at: float, size: int) -> float:
        """The moment for a message of size bytes whose receive was posted at posted_at.

        here_at: when it came over the real link, which knows neither notice nor latency.
        """
        begins_at = max(here_at, posted_at + self.emulation.latency_s, self._free_at)
        per_s = self.emulation.bytes_per_s
        self._free_at = begins_at + (0.0 if per_s is None else size / per_s)
        return self._free_at + self.emulation.latency_s


def sleep_until(moment: float) -> None:
    """Return at a moment of time.monotonic, at once if it has passed."""
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)


def edges(ranks: Ranks) -> list[Channel]:
    """All directed edges of the pipeline, in the one order in which every rank sets them up.

    Activations go from each shard to the same shard of the next stage; feedback from the one rank
    that samples to each shard of the first stage.
    """
    before_last = range(ranks.count - ranks.num_shards)
    neighbours = [Channel(Tensors.ACTIVATIONS, r, r + ranks.num_shards) for r in before_last]
    return [*neighbours, *feedback_edges(ranks)]


def feedback_edges(ranks: Ranks) -> list[Channel]:
    """Those that sampled tokens take."""
    first = (ranks.number(0, shard) for shard in range(ranks.num_shards))
    return [
        Channel(Tensors.FEEDBACK, ranks.sampler, rank) for rank in first if rank != ranks.sampler
    ]
