"""Sums of a stage whose shards are on several hosts.

Each host has the memory of all the stage's shards. A shard copies its part of a round there, as if
all were on its host; a thread of it sends that on to each other host, where a thread of the first
shard there puts it into the memory and says so (kernels/native/exchange.hpp). Whoever adds up does
not know who is where.

A part takes two messages: how many bytes it has, and they themselves. Hosts that do not read it get
the first alone.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from headrace.kernels.exchange import Exchange
from headrace.pipeline.curve_link import CurveLink
from headrace.pipeline.host_edges import HostEdges
from headrace.pipeline.ledger import Channel, Tensors
from headrace.pipeline.links import Check, End
from headrace.protocol.messages import EdgeAddress
from headrace.protocol.ranks import Ranks

# Seconds between two looks, while nothing is added up, at whether it is over.
_LOOK_S = 0.05
_ROUNDS = 1 << 32


class ShardLines:
    """A shard's lines to and from other hosts, in one epoch. listening: where others find them."""

    def __init__(self, rank: int, ranks: Ranks, nodes: Sequence[int], edges: HostEdges) -> None:
        """nodes: by rank, the number of its host. Raises StartError if there can be no sockets."""
        self._ranks, self._edges = ranks, edges
        stage, own = ranks.stage_of(rank), nodes[rank]
        shards = [ranks.number(stage, shard) for shard in range(ranks.num_shards)]
        # The first of each host, by host.
        firsts = {nodes[shard]: shard for shard in reversed(shards)}
        self._first_node = nodes[shards[0]]
        self._out = {
            node: End(Channel(Tensors.SUMS, rank, first), False, ranks)
            for node, first in firsts.items()
            if node != own
        }
        self._in = [
            End(Channel(Tensors.SUMS, shard, rank), True, ranks)
            for shard in shards
            if nodes[shard] != own and firsts[own] == rank
        ]
        with ExitStack() as undo:
            undo.callback(edges.close)
            self.listening: list[EdgeAddress] = [edges.listen(end) for end in self._in]
            undo.pop_all()
        self._incoming: list[CurveLink] = []
        self._threads: list[threading.Thread] = []
        self._over = False
        self._broken: Exception | None = None

    def connect(
        self,
        exchange: Exchange,
        peers: Sequence[EdgeAddress],
        timeout_s: float,
        check: Check,
    ) -> None:
        """Meet the other hosts, and pass on from now on what is added up.

        exchange: joined. peers, timeout_s, check: as of a Meeting. Raises StartError if another
        does not come in time, and what check raises.
        """
        at = {(peer.tensors, peer.source, peer.target): peer.address for peer in peers}
        outgoing = [
            (self._edges.connect(end, at[end.channel], timeout_s, check), node == self._first_node)
            for node, end in self._out.items()
        ]
        self._incoming = [self._edges.accept(end, timeout_s, None, check) for end in self._in]
        self._start(lambda: self._pass_on(exchange, outgoing))
        for link in self._incoming:
            self._start(partial(self._take, exchange, link))

    def check(self) -> None:
        """Raises LinkError once a line is broken."""
        if self._broken is not None:
            raise self._broken

    def leave(self) -> None:
        """Leave, once all that this shard has given is sent. The exchange is left after this."""
        self._end_threads()
        self._edges.close()

    def give_up(self) -> None:
        """Leave at once, whatever is on its way. The exchange is left after this."""
        self._broken = self._broken or ConnectionError("the lines were given up")
        self._end_threads()
        self._edges.give_up()

    def _end_threads(self) -> None:
        self._over = True
        for link in self._incoming:
            link.give_up()
        for thread in self._threads:
            thread.join()

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:
                # Whatever it is: nobody else could tell the shards that wait.
                self._broken = self._broken or error

        thread = threading.Thread(target=run, name="sums", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _pass_on(self, exchange: Exchange, links: Sequence[tuple[CurveLink, bool]]) -> None:
        """This shard's parts, to other hosts; with each, whether the first shard is there."""
        number = 0
        while self._broken is None:
            part = exchange.own_part(number, _LOOK_S)
            if part is None:
                if self._over:
                    return
                continue
            data, for_first = part
            for link, has_first in links:
                size = len(data) if has_first or not for_first else 0
                link.send(torch.tensor([size]))
                if size:
                    link.send(data)
            number = (number + 1) % _ROUNDS

    def _take(self, exchange: Exchange, link: CurveLink) -> None:
        """Another shard's parts, as they come."""
        size, number = torch.empty(1, dtype=torch.int64), 0
        shard = self._ranks.shard_of(link.end.channel.source)
        while True:
            # While nothing is added up nothing comes, for however long.
            link.receive(size).wait(threading.TIMEOUT_MAX)
            if (count := int(size)) > 0:
                link.receive(exchange.room(shard, number, count)).wait(threading.TIMEOUT_MAX)
            exchange.has_come(shard, number)
            number = (number + 1) % _ROUNDS
