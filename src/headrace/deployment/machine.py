"""What there is to know of the hosts before anything is decided."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

import headrace
from headrace.host.control_groups import cpu_quota
from headrace.host.cpus import bfloat16_tiles, computes_bfloat16, usable_cpus
from headrace.host.memory import free_memory
from headrace.kernels import has_native_kernels
from headrace.protocol.hosts import HostFacts, LinkFigures


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The hosts that a pipeline may use, one or several, by their node ranks.

    links: by the numbers of two different hosts, from the first to the second.
    """

    hosts: tuple[HostFacts, ...]
    links: Mapping[tuple[int, int], LinkFigures] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Whether it is one host that never had others: nobody asked how fast it is."""
        return len(self.hosts) == 1 and self.hosts[0].speed is None

    @property
    def computing(self) -> tuple[int, ...]:
        """The numbers of those that have stages."""
        if self.alone:
            return (0,)
        return tuple(number for number, host in enumerate(self.hosts) if host.speed is not None)


def read_machine() -> Cluster:
    """This machine alone, as it is now."""
    return Cluster(hosts=(this_host(),))


def this_host() -> HostFacts:
    """This machine as it is now; neither its speed nor a model's files are looked at."""
    allowed = os.sched_getaffinity(0)
    return HostFacts(
        name=socket.gethostname(),
        address="",
        version=headrace.__version__,
        allowed_cpus=frozenset(allowed),
        cores=tuple(usable_cpus(allowed, cpu_quota())),
        free_memory=free_memory(),
        computes_bfloat16=computes_bfloat16(),
        native_kernels=has_native_kernels(),
        bfloat16_tiles=bfloat16_tiles(),
    )
