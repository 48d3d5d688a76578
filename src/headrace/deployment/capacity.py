"""What hosts can do, in the terms in which stages are placed on them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import StartError
from headrace.protocol.hosts import HostFacts, LinkFigures

# Rows of the step whose time decides: of some ten to hundred clients, spread over microbatches.
# Reading the weights takes about as long as their arithmetic then.
_ROWS = 32
# Bytes of a row's feedback: its count and its token.
_FEEDBACK_BYTES = 8
# Measured a moment long, the rates of hosts that are the same differ by so much, and those of links
# by more. What noise decided would differ from start to start.
_ALIKE_HOSTS = 1.1
_ALIKE_LINKS = 1.25
# Seconds: what it takes to wake who waits for a message differs by so much from one to the next.
_ALIKE_MESSAGES_S = 2e-4


@dataclass(frozen=True, kw_only=True)
class HostCapacity:
    """seconds: what a unit of a step's cost takes with all of the host's cores. free: bytes of its
    memory."""

    name: str
    seconds: float
    free: int


@dataclass(frozen=True, kw_only=True)
class HopSeconds:
    """What a step's messages take between two different hosts, by their numbers. unmeasured: where
    neither says anything."""

    activations: Mapping[tuple[int, int], float]
    feedback: Mapping[tuple[int, int], float]
    unmeasured: float = 0.0

    def onward(self, sender: int, receiver: int) -> float:
        """Of activations."""
        return self.activations.get((sender, receiver), self.unmeasured)

    def back(self, last: int, first: int) -> float:
        """Of feedback; none on one host."""
        return 0.0 if last == first else self.feedback.get((last, first), self.unmeasured)


def capacities(
    hosts: Sequence[HostFacts], dtype: str, element_size: int
) -> tuple[HostCapacity, ...]:
    """Of hosts whose speed was measured, for weights of this dtype.

    A unit of cost is one weight: it is read once a step, and multiplied with each row. Hosts whose
    speeds differ by less than a tenth count as equally fast. Raises StartError for a host that has
    no rates of the dtype.
    """
    seconds = _evened([_unit_seconds(host, dtype, element_size) for host in hosts], _ALIKE_HOSTS)
    return tuple(
        HostCapacity(name=host.label, seconds=own, free=host.free_memory)
        for host, own in zip(hosts, seconds, strict=True)
    )


def hop_seconds(
    links: Mapping[tuple[int, int], LinkFigures], hidden_size: int, element_size: int
) -> HopSeconds:
    """Of links that were measured; those that differ by less than a quarter, or by less than it
    takes to wake a process, count as equal.

    Where some were, a link that was not is one that nobody can use. element_size: bytes of a number
    of the activations.
    """

    def seconds(row_bytes: int) -> dict[tuple[int, int], float]:
        taken = [link.latency_s + _ROWS * row_bytes / link.bytes_per_s for link in links.values()]
        return dict(zip(links, _evened(taken, _ALIKE_LINKS, _ALIKE_MESSAGES_S), strict=True))

    return HopSeconds(
        activations=seconds(hidden_size * element_size),
        feedback=seconds(_FEEDBACK_BYTES),
        unmeasured=math.inf if links else 0.0,
    )


def _unit_seconds(host: HostFacts, dtype: str, element_size: int) -> float:
    rates = None if host.speed is None else host.speed.rates.get(dtype)
    if rates is None:
        raise StartError(f"host {host.label} does not say how fast it is with {dtype} weights")
    return element_size / rates.read_bytes_per_s + 2 * _ROWS / rates.operations_per_s


def _evened(seconds: Sequence[float], factor: float, more_s: float = 0.0) -> list[float]:
    """Those that are alike, none beyond the least of them times the factor and so many seconds
    more, all as their mean."""
    evened = list(seconds)
    left = sorted(range(len(seconds)), key=lambda host: seconds[host])
    while left:
        limit = seconds[left[0]] * factor + more_s
        alike = [host for host in left if seconds[host] <= limit]
        mean = sum(seconds[host] for host in alike) / len(alike)
        for host in alike:
            evened[host] = mean
        left = left[len(alike) :]
    return evened
