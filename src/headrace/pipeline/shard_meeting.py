"""How the shards of a stage come to share memory, in which they add up (kernels/exchange.py).

The first shard of a host makes the memory, without a name, and hands its descriptor to the others
there, which come through doors as the ends of edges do. The connections stay: who waits for a shard
looks at them now and then, and so learns that one is gone. With shards on other hosts it is joined
by lines (pipeline/shard_lines.py).
"""

import os
import select
import socket
from pathlib import Path

from headrace.errors import StartError
from headrace.kernels.exchange import Exchange, memory_size
from headrace.pipeline.host_edges import HostEdges
from headrace.pipeline.ledger import Channel, Tensors
from headrace.pipeline.links import Check, End, LinkError
from headrace.pipeline.local_door import LocalDoor, knock
from headrace.pipeline.shard_lines import ShardLines
from headrace.protocol.messages import EdgeAddress, HostLinks
from headrace.protocol.ranks import Ranks

_HERE = b"memory"


class ShardMeeting:
    """A shard's part in one epoch. listening: where others find this one."""

    def __init__(
        self, rank: int, ranks: Ranks, folder: Path, epoch: int, how: HostLinks | None
    ) -> None:
        """folder: the engine's, on this host. how: to meet ranks on others, None if there are
        none. Raises StartError if there can be no sockets."""
        self._ranks, self._stage = ranks, ranks.stage_of(rank)
        self._shard = ranks.shard_of(rank)
        nodes = [0] * ranks.count if how is None else how.nodes
        shards = [ranks.number(self._stage, shard) for shard in range(ranks.num_shards)]
        here = [shard for shard in shards if nodes[shard] == nodes[rank]]
        first = here[0]
        self._makes_memory = rank == first
        others = here[1:] if rank == first else [rank]
        self._ends = [
            End(Channel(Tensors.SUMS, other, first), rank == first, ranks) for other in others
        ]
        self._lines: ShardLines | None = None
        if how is not None and len(here) < len(shards):
            self._lines = ShardLines(rank, ranks, nodes, HostEdges(how, epoch))
        self._doors = [LocalDoor(end, folder) for end in self._ends if end.incoming]
        self._peers: list[socket.socket] = []
        self._exchange: Exchange | None = None
        self.listening = [
            EdgeAddress(*end.channel, door.address, door.token)
            for end, door in zip(self._ends, self._doors, strict=False)
        ]
        if self._lines is not None:
            self.listening += self._lines.listening

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

        peers: where the others listen. timeout_s, check: for the meeting, as of a Meeting.
        spin_s: seconds for which this rank keeps its core while it waits for another; wait_s: for
        which it waits at all. Raises StartError if another does not come, LinkError if it is gone,
        and what check raises.
        """
        memory = self._new_memory() if self._makes_memory else self._knock(peers, timeout_s, check)
        try:
            for door in self._doors:
                peer = door.wait_for_peer(timeout_s, check)
                self._peers.append(peer)
                socket.send_fds(peer, [_HERE], [memory])
            exchange.join(
                memory,
                self._shard,
                self._ranks.num_shards,
                # The threads of lines have these cores, too.
                spin_s=spin_s if self._lines is None else 0.0,
                check=lambda shard, waited_s: self._look(shard, waited_s, wait_s),
            )
        except OSError as error:
            self._ends[0].gone(error)
        finally:
            os.close(memory)
        self._exchange = exchange
        if self._lines is not None:
            self._lines.connect(exchange, peers, timeout_s, check)

    def leave(self) -> None:
        """Nobody adds up any more. Whoever waits for this shard learns of it."""
        if self._lines is not None:
            self._lines.leave()
        self._leave_host()

    def give_up(self) -> None:
        """Leave at once, whatever is on its way to other hosts."""
        if self._lines is not None:
            self._lines.give_up()
        self._leave_host()

    def _leave_host(self) -> None:
        for door in self._doors:
            door.close()
        for peer in self._peers:
            peer.close()
        self._peers.clear()
        if self._exchange is not None:
            self._exchange.leave()

    def _new_memory(self) -> int:
        """The descriptor of memory that nobody has yet, of zeros. Raises StartError if there is
        none."""
        size = memory_size(self._ranks.num_shards)
        try:
            memory = os.memfd_create("headrace-sums")
            os.ftruncate(memory, size)
        except OSError as error:
            raise StartError(f"no {size} bytes of memory to share with shards: {error}") from error
        return memory

    def _knock(self, peers: list[EdgeAddress], timeout_s: float, check: Check) -> int:
        """The descriptor of the memory."""
        (end,) = self._ends
        (address,) = (p for p in peers if (p.tensors, p.source, p.target) == end.channel)
        try:
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
        except OSError as error:
            end.gone(error)
        return descriptors[0]

    def _look(self, shard: int, waited_s: float, wait_s: float) -> None:
        """Raises LinkError if a shard that this one is joined to is gone, or another is late."""
        if self._lines is not None:
            self._lines.check()
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
