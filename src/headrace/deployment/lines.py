"""The lines between hosts, measured both ways before stages are placed on the hosts.

One after another, so that none disturbs another. Each is tried as an edge would use it: the host at
its end listens, on a free port. So a firewall that would keep stages apart ends the start, and not
only if the plan happens to need that line.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Protocol

from headrace.deployment.machine import Cluster
from headrace.errors import StartError
from headrace.host.cluster_key import Secret
from headrace.host.network import Interface
from headrace.pipeline.line import CONNECT_S, MEASURE_S, take_part
from headrace.protocol.cluster import (
    AnswerLine,
    LineFailed,
    LineMeasured,
    LineOpen,
    MeasureLine,
    ToldOfLine,
)
from headrace.protocol.hosts import HostFacts, LinkFigures

_log = logging.getLogger(__name__)

# Seconds between two looks whether the start is still wanted; and until a host has done its part,
# which it may begin only when it is done with the line before.
_LOOK_S = 0.2
_PART_S = 2 * (CONNECT_S + MEASURE_S)


class OtherHosts(Protocol):
    """The hosts beside this one, as pipeline/hosts.py has them."""

    def order_line(
        self, node: int, order: AnswerLine | MeasureLine
    ) -> "queue.SimpleQueue[ToldOfLine]":
        """Have a host do its part in measuring a line; what it says comes there."""

    def is_there(self, node: int) -> bool:
        """Whether a host takes part now."""


def measure_lines(
    hosts: OtherHosts,
    everybody: Sequence[HostFacts],
    here: Interface,
    secret: Secret,
    encrypted: bool,
    check: Callable[[], None],
) -> dict[tuple[int, int], LinkFigures]:
    """Of each host that has stages to each other, by their numbers.

    everybody: the hosts, this one, reached by the interface `here`, first. secret: for this alone.
    encrypted: or only authenticated, as the edges are going to be. check: called once a second or
    more often, may raise. Takes a second or so for two hosts, both ways, and some twenty if hardly
    anything gets through. Raises StartError naming both hosts if a line cannot be opened, or
    nothing comes through.
    """
    began = time.monotonic()
    found = {}
    for sender, receiver in permutations(Cluster(hosts=tuple(everybody)).computing, 2):
        name = f"line from host {sender} to host {receiver}"
        key = (name, secret.value, encrypted)
        answering = _order(hosts, here, receiver, AnswerLine(*key))
        opened = _told(hosts, everybody, receiver, answering, check)
        if isinstance(opened, LineFailed):
            raise StartError(f"host {everybody[receiver].label} {opened.reason}")
        assert isinstance(opened, LineOpen)
        measuring = _order(hosts, here, sender, MeasureLine(*key, opened.address))
        told = _told(hosts, everybody, sender, measuring, check)
        if isinstance(told, LineFailed):
            raise StartError(
                f"host {everybody[sender].label} {told.reason}; there, host "
                f"{everybody[receiver].label} listens on {opened.interface}: let these two reach "
                "each other on all TCP ports above 1023 in their firewalls, or choose other "
                "interfaces (--interface)"
            )
        assert isinstance(told, LineMeasured)
        found[sender, receiver] = told.figures
    _log.info("measured %d lines between hosts in %.1f s", len(found), time.monotonic() - began)
    return found


def _order(
    hosts: OtherHosts, here: Interface, node: int, order: AnswerLine | MeasureLine
) -> "queue.SimpleQueue[ToldOfLine]":
    """Have a host do its part; where what it says comes."""
    if node:
        return hosts.order_line(node, order)
    told: queue.SimpleQueue[ToldOfLine] = queue.SimpleQueue()

    def obey() -> None:
        for each in take_part(order, here.address, str(here)):
            told.put(each)

    threading.Thread(target=obey, name=order.name, daemon=True).start()
    return told


def _told(
    hosts: OtherHosts,
    everybody: Sequence[HostFacts],
    node: int,
    told: "queue.SimpleQueue[ToldOfLine]",
    check: Callable[[], None],
) -> ToldOfLine:
    """What a host says next."""
    label, deadline = everybody[node].label, time.monotonic() + _PART_S
    while time.monotonic() < deadline:
        check()
        try:
            return told.get(timeout=_LOOK_S)
        except queue.Empty:
            if node and not hosts.is_there(node):
                raise StartError(
                    f"host {label} was gone when its lines to the others were measured"
                ) from None
    raise StartError(
        f"host {label} did not say within {_PART_S:g} s what its lines to the others can do"
    )
