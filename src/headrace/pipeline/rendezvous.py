"""How a rank's links are set up in an epoch, whatever they are made of.

With links of Headrace's own: a rank listens on each edge that comes in to it, and says where when
it has loaded; the engine gathers that, and tells each rank where the edges end that go out from it;
the rank connects. All listen before anybody connects, so nobody has to try again.

torch.distributed has a rendezvous of its own, at a store whose address all ranks know.
"""

from pathlib import Path

import torch

from headrace.pipeline import group_link
from headrace.pipeline.ledger import Channel
from headrace.pipeline.links import End, Link, SlowLine, edges
from headrace.pipeline.local_door import LocalDoor, knock
from headrace.pipeline.local_link import ReceivingLink, SendingLink
from headrace.protocol.messages import EdgeAddress, RankConfig


class Meeting:
    """A rank's part in the rendezvous of one epoch, and then the owner of its links.

    listening: where others find the edges that come in. Raises StartError if that cannot be.
    """

    def __init__(self, config: RankConfig, folder: Path) -> None:
        """folder: the engine's, on this host."""
        self._config = config
        self._doors: dict[Channel, LocalDoor] = {}
        self._own: list[SendingLink | ReceivingLink] = []
        if config.link_backend == "local":
            for end in self._ends():
                if end.incoming:
                    self._doors[end.channel] = LocalDoor(end, folder)

    @property
    def listening(self) -> list[EdgeAddress]:
        """Where this rank listens, an entry an edge."""
        return [EdgeAddress(*edge, door.address, door.token) for edge, door in self._doors.items()]

    def connect(self, peers: list[EdgeAddress], device: torch.device) -> dict[Channel, Link]:
        """This rank's ends of all its edges.

        peers: where the edges that go out end. Raises StartError if another rank does not come.
        """
        config = self._config
        if config.link_backend == "local":
            return self._connect_local(peers)
        meeting = group_link.Rendezvous(config.master_addr, config.master_port, config.store_fd)
        return group_link.connect(
            meeting,
            config.rank,
            config.ranks,
            device,
            config.start_timeout,
            config.link_emulation,
        )

    def close(self) -> None:
        """Leave all edges. What was sent on links of Headrace's own is still received."""
        for door in self._doors.values():
            door.close()
        for link in self._own:
            link.close()
        if self._config.link_backend == "gloo":
            group_link.disconnect()

    def _connect_local(self, peers: list[EdgeAddress]) -> dict[Channel, Link]:
        config = self._config
        at = {(peer.tensors, peer.source, peer.target): peer for peer in peers}
        links: dict[Channel, Link] = {}
        # Doors let their peers in meanwhile.
        for end in sorted(self._ends(), key=lambda end: end.incoming):
            link: SendingLink | ReceivingLink
            if end.incoming:
                line = None if config.link_emulation is None else SlowLine(config.link_emulation)
                paired = self._doors[end.channel].wait_for_peer(config.start_timeout)
                link = ReceivingLink(end, paired, line)
            else:
                peer = at[end.channel]
                paired = knock(end, peer.address, peer.token, config.start_timeout)
                link = SendingLink(end, paired)
            self._own.append(link)
            links[end.channel] = link
        return links

    def _ends(self) -> list[End]:
        rank, ranks = self._config.rank, self._config.ranks
        return [End(edge, edge.target == rank, ranks) for edge in edges(ranks) if rank in edge[1:]]
