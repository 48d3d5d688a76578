"""What there is to know of this machine before anything is decided."""

import os
from dataclasses import dataclass

from headrace.host.control_groups import cpu_quota
from headrace.host.cpus import computes_bfloat16, usable_cpus
from headrace.host.memory import free_memory
from headrace.kernels import has_native_kernels


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine. allowed_cpus: those that this process may use. cores: those of them that are
    worth a thread each, in ascending order. free_memory: in bytes. computes_bfloat16: whether the
    cores multiply it. native_kernels: whether there are any."""

    allowed_cpus: frozenset[int]
    cores: tuple[int, ...]
    free_memory: int
    computes_bfloat16: bool
    native_kernels: bool


def read_machine() -> Machine:
    """The machine as it is now."""
    allowed = os.sched_getaffinity(0)
    return Machine(
        allowed_cpus=frozenset(allowed),
        cores=tuple(usable_cpus(allowed, cpu_quota())),
        free_memory=free_memory(),
        computes_bfloat16=computes_bfloat16(),
        native_kernels=has_native_kernels(),
    )
