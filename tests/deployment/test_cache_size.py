import pytest

from headrace.deployment.cache_size import CacheLimit, choose_num_blocks
from headrace.errors import StartError


def test_all_stages_get_the_same_number_of_blocks() -> None:
    # A limit a stage counts against the dearest stage.
    assert blocks(max_model_len=32, bytes_per_stage=3000) == 100
    # A share of what is free counts against all stages of the machine together.
    assert blocks(max_model_len=32) == 125
    # More than all sequences can use is of no use.
    assert blocks(max_model_len=32, max_num_seqs=3) == 6


def test_a_cache_without_room_for_one_sequence_is_refused() -> None:
    with pytest.raises(StartError, match=r"--max-model-len 5000.* --gpu-memory-utilization"):
        blocks(max_model_len=5000)
    with pytest.raises(StartError, match="lower --kv-cache-memory"):
        blocks(max_model_len=32, bytes_per_stage=6000)


def blocks(
    *, max_model_len: int, max_num_seqs: int = 256, bytes_per_stage: int | None = None
) -> int:
    """Of two stages' caches, on a machine with 10,000 bytes."""
    return choose_num_blocks(
        [10, 30],
        CacheLimit(bytes_per_stage=bytes_per_stage, share_of_free=0.5),
        block_size=16,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        free=10_000,
        promised=0,
    )
