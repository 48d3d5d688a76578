"""How many KV-cache blocks there are: the same number on every stage."""

import re
from pathlib import Path

from headrace.errors import StartError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}

# Of what is free once the weights are loaded; the rest is for activations and everybody else.
_SHARE_OF_FREE = 0.5


def parse_size(text: str) -> int | None:
    """Bytes of a size such as 2GiB, 500MB or 1000000; None if it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    return int(float(match[1]) * _UNITS[match[2] or ""]) if match else None


def free_memory() -> int:
    """Bytes that this machine, and the control group this process is in, still have."""
    free = 1 << 62
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))


def choose_num_blocks(
    bytes_per_block: list[int],
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    per_stage_limit: int | None,
) -> int:
    """Blocks that every stage of this machine can hold.

    bytes_per_block: one number per stage. per_stage_limit: --kv-cache-memory in bytes, None for a
    share of the free memory. Raises StartError if not even one sequence of max_model_len fits.
    """
    needed = -(-max_model_len // block_size)
    free = free_memory()
    if per_stage_limit is None:
        fitting = int(free * _SHARE_OF_FREE) // sum(bytes_per_block)
        limit = f"{_gib(int(free * _SHARE_OF_FREE))} of the {_gib(free)} that are free"
    else:
        fitting = per_stage_limit // max(bytes_per_block)
        limit = f"--kv-cache-memory {_gib(per_stage_limit)} a stage"
        if per_stage_limit * len(bytes_per_block) > free:
            raise StartError(
                f"not enough memory for the cache: {limit} on {len(bytes_per_block)} stages, "
                f"but {_gib(free)} are free: lower --kv-cache-memory"
            )
    if fitting < needed:
        wanted = sum(bytes_per_block) if per_stage_limit is None else max(bytes_per_block)
        raise StartError(
            f"not enough memory for the cache: one sequence of --max-model-len {max_model_len} "
            f"takes {_gib(needed * wanted)}, there is {limit}: lower --max-model-len or raise "
            "--kv-cache-memory"
        )
    return min(fitting, needed * max_num_seqs)


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
