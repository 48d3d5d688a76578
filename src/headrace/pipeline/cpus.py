"""Which cores each stage of this machine runs on."""

import itertools
import os


def split_cpus(num_stages: int) -> list[list[int]]:
    """Disjoint cores for each stage, of those this process may use.

    With more stages than cores all lists are empty: nothing is pinned.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if num_stages > len(cpus):
        return [[] for _ in range(num_stages)]
    bounds = [len(cpus) * stage // num_stages for stage in range(num_stages + 1)]
    return [cpus[a:b] for a, b in itertools.pairwise(bounds)]


def computes_bfloat16() -> bool:
    """Whether this machine's cores have instructions for bfloat16 products."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as info:
            flags = next((line for line in info if line.startswith(("flags", "Features"))), "")
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags.split())
