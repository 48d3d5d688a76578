"""How a rank's links are set up in an epoch, whatever they are made of.

With links of Headrace's own: a rank listens on each edge that comes in to it, and says where when
it has loaded; the engine gathers that, and tells each rank where the edges end that go out from it;
the rank connects. All listen before anybody connects, so nobody has to try again.

torch.distributed has a rendezvous of its own, at a store whose address all ranks know.
"""

from pathlib import Path

import torch

from headrace.pipeline import group_link
from headrace.pipeline.host_edges import HostEdges
from headrace.pipeline.ledger import Channel
from headrace.pipeline.links import Check, End, Link, SlowLine, edges
from headrace.pipeline.local_door import LocalDoor, knock
from headrace.pipeline.local_link import ReceivingLink, SendingLink
from headrace.protocol.messages import EdgeAddress, LinkBackend, LinkEmulation
from headrace.protocol.ranks import Ranks


class Meeting:
    """A rank's part in the rendezvous of one epoch, and then the owner of its links.

    listening: where others find the edges that come in, an entry an edge. Raises StartError if that
    cannot be.
    """

    def __init__(
        self,
        rank: int,
        ranks: Ranks,
        backend: LinkBackend,
        folder: Path,
        emulation: LinkEmulation | None,
        between: HostEdges | None = None,
    ) -> None:
        """folder: the engine's, on this host. emulation: make the edges slower than they are.
        between: those from and to other hosts, None if all ranks are on this one."""
        self._rank, self._ranks, self._backend = rank, ranks, backend
        self._emulation, self._between = emulation, between
        self._doors: dict[Channel, LocalDoor] = {}
        self._own: list[SendingLink | ReceivingLink] = []
        self.listening: list[EdgeAddress] = []
        if backend == "local":
            for end in self._ends():
                if end.incoming:
                    self.listening.append(self._listen(end, folder))

    def connect(
        self,
        peers: list[EdgeAddress],
        store: group_link.Rendezvous,
        device: torch.device,
        timeout_s: float,
        check: Check,
    ) -> dict[Channel, Link]:
        """This rank's ends of all its edges.

        peers: where the edges that go out end. store: for torch.distributed, which does not check.
        Raises StartError if another rank does not come within timeout_s, LinkError if it is gone,
        and what check raises.
        """
        if self._backend == "local":
            return self._connect_local(peers, timeout_s, check)
        return group_link.connect(
            store, self._rank, self._ranks, device, timeout_s, self._emulation
        )

    def give_up(self) -> None:
        """Leave all edges at once, whatever travels on them. Those of torch.distributed stay: their
        process ends next."""
        for door in self._doors.values():
            door.close()
        for link in self._own:
            link.give_up()
            link.close()
        if self._between is not None:
            self._between.give_up()

    def close(self) -> None:
        """Leave all edges. What was sent on links of Headrace's own is still received."""
        for door in self._doors.values():
            door.close()
        for link in self._own:
            link.close()
        if self._between is not None:
            self._between.close()
        if self._backend == "gloo":
            group_link.disconnect()

    def _listen(self, end: End, folder: Path) -> EdgeAddress:
        if self._between is not None and self._between.has(end):
            return self._between.listen(end)
        door = self._doors[end.channel] = LocalDoor(end, folder)
        return EdgeAddress(*end.channel, door.address, door.token)

    def _connect_local(
        self, peers: list[EdgeAddress], timeout_s: float, check: Check
    ) -> dict[Channel, Link]:
        at = {(peer.tensors, peer.source, peer.target): peer for peer in peers}
        links: dict[Channel, Link] = {}
        # Doors let their peers in meanwhile.
        for end in sorted(self._ends(), key=lambda end: end.incoming):
            link: SendingLink | ReceivingLink
            line = None if self._emulation is None else SlowLine(self._emulation)
            if self._between is not None and self._between.has(end):
                links[end.channel] = (
                    self._between.accept(end, timeout_s, line, check)
                    if end.incoming
                    else self._between.connect(end, at[end.channel].address, timeout_s, check)
                )
                continue
            if end.incoming:
                paired = self._doors[end.channel].wait_for_peer(timeout_s, check)
                link = ReceivingLink(end, paired, line)
            else:
                peer = at[end.channel]
                paired = knock(end, peer.address, peer.token, timeout_s, check)
                link = SendingLink(end, paired)
            self._own.append(link)
            links[end.channel] = link
        return links

    def _ends(self) -> list[End]:
        rank, ranks = self._rank, self._ranks
        return [End(edge, edge.target == rank, ranks) for edge in edges(ranks) if rank in edge[1:]]
