"""A rank's edges to and from ranks on other hosts, in one epoch."""

import zmq

from headrace.host.cluster_key import Secret
from headrace.pipeline.curve import Gate
from headrace.pipeline.curve_link import CurveLink, CurveListener, EdgeKey, connect_curve
from headrace.pipeline.links import Check, End, SlowLine
from headrace.protocol.messages import EdgeAddress, HostLinks


class HostEdges:
    """Those of one rank. Always close() it."""

    def __init__(self, how: HostLinks, epoch: int) -> None:
        self._how = how
        self._key = EdgeKey(Secret(how.secret), epoch, how.encrypted)
        # One thread each to encrypt and to decrypt.
        self._context = zmq.Context(io_threads=2)
        self._gate = Gate(self._context)
        self._listeners: dict[End, CurveListener] = {}
        self._links: list[CurveLink] = []

    def has(self, end: End) -> bool:
        """Whether the edge is between hosts."""
        nodes = self._how.nodes
        return nodes[end.channel.source] != nodes[end.channel.target]

    def listen(self, end: End) -> EdgeAddress:
        """At the receiving end. Raises StartError if that cannot be."""
        listener = CurveListener(self._context, self._gate, end, self._key, self._how.address)
        self._listeners[end] = listener
        return EdgeAddress(*end.channel, listener.address, "")

    def accept(self, end: End, timeout_s: float, line: SlowLine | None, check: Check) -> CurveLink:
        """The receiving end, once the peer is there; StartError if it does not come in time."""
        link = self._listeners.pop(end).accept(timeout_s, line, check)
        self._links.append(link)
        return link

    def connect(self, end: End, address: str, timeout_s: float, check: Check) -> CurveLink:
        """The sending end; StartError if the peer does not let it in in time."""
        link = connect_curve(self._context, end, self._key, address, timeout_s, check)
        self._links.append(link)
        return link

    def give_up(self) -> None:
        """Leave all edges at once, whatever travels on them."""
        for link in self._links:
            link.give_up()
        self.close()

    def close(self) -> None:
        """Leave all edges. What was sent, and can be received, still is; this waits for it."""
        for listener in self._listeners.values():
            listener.close()
        for link in self._links:
            link.close()
        self._context.term()
