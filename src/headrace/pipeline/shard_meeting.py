"""How the shards of a stage come to share memory, in which they add up (kernels/exchange.py).

The first shard makes the memory, without a name, and hands its descriptor to the others, which come
through doors as the ends of edges do. The connections stay: who waits for a shard looks at them now
and then, and so learns that one is gone.
"""

import os
import select
import socket
from pathlib import Path

from headrace.kernels.exchange import Exchange, memory_size
from headrace.pipeline.ledger import Channel, Tensors
from headrace.pipeline.links import Check, End, LinkError
from headrace.pipeline.local_door import LocalDoor, knock
from headrace.protocol.messages import EdgeAddress
from headrace.protocol.ranks import Ranks

_HERE = b"memory"


class ShardMeeting:
    """A shard's part in one epoch. listening: where others find the first shard's doors."""

    def __init__(self, rank: int, ranks: Ranks, folder: Path) -> None:
        """folder: the engine's. Raises StartError if there can be no sockets in it."""
        self._ranks, self._stage = ranks, ranks.stage_of(rank)
        self._shard, first = ranks.shard_of(rank), ranks.number(ranks.stage_of(rank))
        others = range(first + 1, first + ranks.num_shards) if rank == first else (rank,)
        self._ends = [
            End(Channel(Tensors.SUMS, other, first), rank == first, ranks)
            for other in others
            if ranks.num_shards > 1
        ]
        self._doors = [LocalDoor(end, folder) for end in self._ends if end.incoming]
        self._peers: list[socket.socket] = []
        self._exchange: Exchange | None = None
        self.listening = [
            EdgeAddress(*end.channel, door.address, door.token)
            for end, door in zip(self._ends, self._doors, strict=False)
        ]

    def join(
        self,
        exchange: Exchange,
        peers: list[EdgeAddress],
        timeout_s: float,
        check: Check,
        *,
        spin_s: float,
        wait_s: float,
    ) -> None:
        """Meet the others.

        peers: where the first shard listens. timeout_s, check: for the meeting, as of a Meeting.
        spin_s: seconds for which this rank keeps its core while it waits for another; wait_s: for
        which it waits at all. Raises StartError if another does not come, LinkError if it is gone,
        and what check raises.
        """
        try:
            memory = (
                self._new_memory() if self._shard == 0 else self._knock(peers, timeout_s, check)
            )
        except OSError as error:
            self._ends[0].gone(error)
        try:
            for door in self._doors:
                peer = door.wait_for_peer(timeout_s, check)
                self._peers.append(peer)
                socket.send_fds(peer, [_HERE], [memory])
            exchange.join(
                memory,
                self._shard,
                self._ranks.num_shards,
                spin_s=spin_s,
                check=lambda shard, waited_s: self._look(shard, waited_s, wait_s),
            )
        except OSError as error:
            self._ends[0].gone(error)
        finally:
            os.close(memory)
        self._exchange = exchange

    def leave(self) -> None:
        """Nobody adds up any more. Whoever waits for this shard learns of it."""
        for door in self._doors:
            door.close()
        for peer in self._peers:
            peer.close()
        self._peers.clear()
        if self._exchange is not None:
            self._exchange.leave()

    def _new_memory(self) -> int:
        """The descriptor of memory that nobody has yet, of zeros."""
        memory = os.memfd_create("headrace-sums")
        os.ftruncate(memory, memory_size(self._ranks.num_shards))
        return memory

    def _knock(self, peers: list[EdgeAddress], timeout_s: float, check: Check) -> int:
        """The descriptor of the memory."""
        (end,) = self._ends
        (address,) = (p for p in peers if (p.tensors, p.source, p.target) == end.channel)
        peer = knock(end, address.address, address.token, timeout_s, check)
        self._peers.append(peer)
        peer.setblocking(True)
        peer.settimeout(timeout_s)
        said, descriptors, _, _ = socket.recv_fds(peer, len(_HERE), 1)
        peer.setblocking(False)
        if said != _HERE or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ConnectionError("it did not share its memory")
        return descriptors[0]

    def _look(self, shard: int, waited_s: float, wait_s: float) -> None:
        """Raises LinkError if a shard that this one is joined to is gone, or another is late."""
        awaited = self._ranks.number(self._stage, shard)
        gone = select.poll()
        for peer in self._peers:
            gone.register(peer, select.POLLIN)
        if gone.poll(0):
            raise LinkError(
                f"adding up with {self._ranks.name(awaited)}: a shard of the stage is gone", awaited
            )
        if waited_s > wait_s:
            raise LinkError(
                f"adding up with {self._ranks.name(awaited)}: nothing came within {wait_s:g} s (if "
                "a step may take that long, raise --stall-timeout)",
                awaited,
            )
