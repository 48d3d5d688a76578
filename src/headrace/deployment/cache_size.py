"""How many KV-cache blocks there are: the same number on every stage."""

from dataclasses import dataclass

from headrace.deployment.stage_memory import gib
from headrace.errors import StartError


@dataclass(frozen=True, kw_only=True)
class CacheLimit:
    """How much memory the cache may take.

    bytes_per_stage: --kv-cache-memory, None for share_of_free of the free memory for all stages
    together (--gpu-memory-utilization); the rest is for activations and everybody else.
    """

    bytes_per_stage: int | None
    share_of_free: float


def check_max_model_len(
    max_model_len: int, bytes_per_position: int, limit: CacheLimit, free: int
) -> None:
    """Refuse, before anything is loaded, a context that cannot fit even beside no weights at all.

    bytes_per_position: of all stages. free: bytes of memory. The files or the user say how long it
    is, and much is as long; choose_num_blocks counts exactly. Raises StartError that says how many
    positions fit.
    """
    share = limit.share_of_free if limit.bytes_per_stage is None else 1.0
    fitting = int(free * share) // bytes_per_position
    if max_model_len > fitting:
        raise StartError(
            f"not enough memory: one sequence of --max-model-len {max_model_len} takes "
            f"{gib(max_model_len * bytes_per_position)}, and of the {gib(free)} that are free "
            f"there is room for less than {fitting + 1}: set --max-model-len to less than that"
        )


def choose_num_blocks(
    bytes_per_block: list[int],
    limit: CacheLimit,
    *,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    free: int,
    promised: int,
) -> int:
    """Blocks that every stage of this machine can hold.

    bytes_per_block: one number per stage. free: bytes of memory, the weights loaded. promised:
    those of them that only look free, since they are other engines' caches. Raises StartError if
    not even one sequence of max_model_len fits.
    """
    needed = -(-max_model_len // block_size)
    free = max(0, free - promised)
    per_stage = limit.bytes_per_stage
    others = f", beside {gib(promised)} promised to other engines" if promised else ""
    if per_stage is None:
        usable = int(free * limit.share_of_free)
        fitting = usable // sum(bytes_per_block)
        room = f"{gib(usable)} of the {gib(free)} that are free{others}"
    else:
        fitting = per_stage // max(bytes_per_block)
        room = f"--kv-cache-memory {gib(per_stage)} a stage"
        if per_stage * len(bytes_per_block) > free:
            raise StartError(
                f"not enough memory for the cache: {room} on {len(bytes_per_block)} stages, "
                f"but {gib(free)} are free{others}: lower --kv-cache-memory"
            )
    if fitting < needed:
        wanted = sum(bytes_per_block) if per_stage is None else max(bytes_per_block)
        raise StartError(
            f"not enough memory for the cache: one sequence of --max-model-len {max_model_len} "
            f"takes {gib(needed * wanted)}, there is {room}, enough for {fitting * block_size}: "
            "lower --max-model-len or raise "
            f"{'--gpu-memory-utilization' if per_stage is None else '--kv-cache-memory'}"
        )
    return min(fitting, needed * max_num_seqs)
