"""What a figure was measured on: the machine and the versions, for every bench's output."""

import importlib.metadata
import os
import platform
from typing import Any

import headrace
from headrace.host.control_groups import cpu_quota
from headrace.host.cpus import cpu_flags, cpu_info, usable_cpus

# Those that decide which products and which kernels run: x86, then aarch64.
_FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip


def machine() -> dict[str, Any]:
    """cpu: its name. cores: that stages may use. features: of those that matter here, what
    the CPU has. memory_gib: of the machine."""
    info = cpu_info()
    flags = cpu_flags(info)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": info.get("model name") or platform.machine(),
        "cores": usable_cores(),
        "features": [feature for feature in _FEATURES if feature in flags],
        "memory_gib": round(memory / 2**30, 1),
    }


def versions() -> dict[str, str]:
    """Of what the figures depend on most."""
    return {
        "headrace": headrace.__version__,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }


def usable_cores() -> int:
    """Cores that stages may use, all together."""
    return len(usable_cpus(os.sched_getaffinity(0), cpu_quota()))
