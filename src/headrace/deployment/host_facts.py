"""What a host says of itself, so that ranks may be placed on it."""

from collections.abc import Callable

import msgspec

from headrace.checkpoint.digest import weights_digest
from headrace.checkpoint.locate import ModelFiles
from headrace.deployment.machine import this_host
from headrace.host.alone import answer_alone
from headrace.host.cpus import StageCpus
from headrace.protocol.hosts import HostFacts, HostSpeed


def read_host_facts(
    address: str,
    files: ModelFiles | None,
    check: Callable[[], None] = lambda: None,
    *,
    computes: bool = True,
) -> HostFacts:
    """All about this host. address: by which others reach it. files: the model's, if it has them.
    check: called once a second or more often, may raise. computes: whether it is to have stages;
    else its speed is not measured.

    Takes some seconds, most of them to load torch in a process of its own. Raises ModelError for
    files that are missing or damaged, PipelineError if that process fails.
    """
    host = this_host()
    return msgspec.structs.replace(
        host,
        address=address,
        speed=measure_speed(host.cores, check) if computes else None,
        weights=None if files is None else weights_digest(files),
    )


def measure_speed(cores: tuple[int, ...], check: Callable[[], None] = lambda: None) -> HostSpeed:
    """The rates of the kernels on these cores, a thread on each; PipelineError if that fails.
    check: called once a second or more often, may raise."""
    cpus = StageCpus(list(cores), len(cores))
    answer = answer_alone("headrace.kernels.rates", "measuring this host's speed", cpus, b"", check)
    return msgspec.msgpack.decode(answer, type=HostSpeed)
