"""Which cores each stage of this machine runs on, and with how many OpenMP threads."""

import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from headrace.checks import shortened
from headrace.errors import UsageError


@dataclass(frozen=True)
class StageCpus:
    """Where a stage computes. cpus: its cores, none if it is not pinned. threads: OpenMP's."""

    cpus: list[int]
    threads: int


def stage_cpus(
    num_stages: int,
    threads: int | None,
    bind: str,
    *,
    allowed: Collection[int],
    cores: Collection[int],
) -> list[StageCpus]:
    """Cores and threads of each stage, as --cpu-threads and --cpu-bind want them.

    threads: of each stage; None for one on each of its cores. bind: auto for disjoint shares of
    the cores; none for the threads of auto, not pinned; or each stage's CPUs, such as "0-3|4-7".
    With more stages than cores, auto pins nothing. cores: those that usable_cpus() finds worth a
    thread each. Raises UsageError for anything else, and for CPUs that are not allowed.
    """
    if bind in ("auto", "none"):
        shares = split_cpus(sorted(cores), num_stages)
    else:
        shares = parse_cpu_bind(bind, num_stages, allowed)
    return [
        StageCpus(cpus=[] if bind == "none" else share, threads=threads or max(1, len(share)))
        for share in shares
    ]


def usable_cpus(
    allowed: Collection[int],
    quota: float | None,
    topology: Path = Path("/sys/devices/system/cpu"),
) -> list[int]:
    """Those of the allowed CPUs that are worth a thread each, in ascending order.

    One of each core, since its hardware threads share the arithmetic units; and no more than the
    quota (in CPUs) has time for, but one at least: threads that use it up are all stopped until the
    next period.
    """
    cores = [
        cpu
        for cpu in sorted(allowed)
        if cpu == min(cpu, *(s for s in _siblings(cpu, topology) if s in allowed))
    ]
    return cores if quota is None else cores[: max(1, int(quota))]


def split_cpus(cpus: list[int], num_stages: int) -> list[list[int]]:
    """Disjoint shares of the cores, as even as can be; all empty with more stages than cores."""
    if num_stages > len(cpus):
        return [[] for _ in range(num_stages)]
    bounds = [len(cpus) * stage // num_stages for stage in range(num_stages + 1)]
    return [cpus[a:b] for a, b in itertools.pairwise(bounds)]


def parse_cpu_bind(text: str, num_stages: int, allowed: Collection[int]) -> list[list[int]]:
    """Each stage's cores, in ascending order, from a list such as "0-3|4-7" or "0,2|1,3".

    Raises UsageError if it is none, does not fit the stages, or names a core that is not allowed.
    """
    try:
        parts = [_ranges(part) for part in text.split("|")]
    except ValueError:
        raise UsageError(
            f"--cpu-bind {shortened(text)} is neither auto nor none nor a list of each stage's "
            "cores such as 0-3|4-7"
        ) from None
    if len(parts) != num_stages:
        raise UsageError(
            f"--cpu-bind {text} is for {len(parts)} stages, --pipeline-parallel-size is "
            f"{num_stages}"
        )
    for cpu in itertools.chain(*itertools.chain(*parts)):
        if cpu not in allowed:
            raise UsageError(
                f"--cpu-bind {text}: this process may not use core {cpu}, only "
                f"{cores_in_words(allowed)}"
            )
    return [sorted(set(itertools.chain(*part))) for part in parts]


def _ranges(text: str) -> list[range]:
    """Of a list such as 0-3,8 as Linux writes it; ValueError if it is none."""
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(r" *([0-9]{1,9})(?:-([0-9]{1,9}))? *", part)
        found = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
        if not found:
            raise ValueError(part)
        ranges.append(found)
    return ranges


def cores_in_words(cpus: Collection[int]) -> str:
    """Cores as Linux lists them, such as 0-3,8."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def _siblings(cpu: int, topology: Path) -> list[int]:
    """The hardware threads of the CPU's core; itself alone if the system does not tell."""
    try:
        text = (topology / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
        return list(itertools.chain(*_ranges(text.strip())))
    except (OSError, ValueError):
        return [cpu]


def computes_bfloat16() -> bool:
    """Whether this machine's cores have instructions for bfloat16 products."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpu_flags(cpu_info()))


def bfloat16_tiles() -> bool:
    """Whether this machine's cores multiply bfloat16 by tiles of a matrix (AMX)."""
    return "amx_bf16" in cpu_flags(cpu_info())


def cpu_info() -> dict[str, str]:
    """What the system says about the first core; nothing where it says nothing."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            first = file.read().split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def cpu_flags(info: dict[str, str]) -> set[str]:
    """Names of instruction sets that cpu_info() tells, on x86 or Arm."""
    return set(info.get("flags", info.get("Features", "")).split())
