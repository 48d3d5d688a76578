"""How many KV-cache blocks there are: the same number on every stage."""

from pathlib import Path

from headrace.errors import StartError
from headrace.host.control_groups import memory_left


def free_memory() -> int:
    """Bytes that this machine still has, and every control group that this process is in."""
    free = 1 << 62
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    allowed = memory_left()
    return free if allowed is None else min(free, allowed)


def check_max_model_len(max_model_len: int, bytes_per_position: int, share_of_free: float) -> None:
    """Refuse, before anything is loaded, a context that cannot fit even beside no weights at all.

    bytes_per_position: of all stages. The files or the user say how long it is, and much is as
    long; choose_num_blocks counts exactly. Raises StartError that says how many positions fit.
    """
    free = free_memory()
    fitting = int(free * share_of_free) // bytes_per_position
    if max_model_len > fitting:
        raise StartError(
            f"not enough memory: one sequence of --max-model-len {max_model_len} takes "
            f"{_gib(max_model_len * bytes_per_position)}, and of the {_gib(free)} that are free "
            f"there is room for less than {fitting + 1}: set --max-model-len to less than that"
        )


def choose_num_blocks(
    bytes_per_block: list[int],
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    per_stage_limit: int | None,
    share_of_free: float,
    promised: int,
) -> int:
    """Blocks that every stage of this machine can hold.

    bytes_per_block: one number per stage. per_stage_limit: --kv-cache-memory in bytes, None for
    share_of_free of the free memory for all stages together (--gpu-memory-utilization); the rest
    is for activations and everybody else. promised: bytes that look free but are other engines'
    caches. Raises StartError if not even one sequence of max_model_len fits.
    """
    needed = -(-max_model_len // block_size)
    free = max(0, free_memory() - promised)
    others = f", beside {_gib(promised)} promised to other engines" if promised else ""
    if per_stage_limit is None:
        usable = int(free * share_of_free)
        fitting = usable // sum(bytes_per_block)
        limit = f"{_gib(usable)} of the {_gib(free)} that are free{others}"
    else:
        fitting = per_stage_limit // max(bytes_per_block)
        limit = f"--kv-cache-memory {_gib(per_stage_limit)} a stage"
        if per_stage_limit * len(bytes_per_block) > free:
            raise StartError(
                f"not enough memory for the cache: {limit} on {len(bytes_per_block)} stages, "
                f"but {_gib(free)} are free{others}: lower --kv-cache-memory"
            )
    if fitting < needed:
        wanted = sum(bytes_per_block) if per_stage_limit is None else max(bytes_per_block)
        raise StartError(
            f"not enough memory for the cache: one sequence of --max-model-len {max_model_len} "
            f"takes {_gib(needed * wanted)}, there is {limit}, enough for {fitting * block_size}: "
            "lower --max-model-len or raise "
            f"{'--gpu-memory-utilization' if per_stage_limit is None else '--kv-cache-memory'}"
        )
    return min(fitting, needed * max_num_seqs)


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
