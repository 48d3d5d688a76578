import pytest

from headrace.deployment import cache_size
from headrace.deployment.cache_size import choose_num_blocks, free_memory
from headrace.errors import StartError


def test_free_memory_is_a_plausible_number_of_bytes() -> None:
    assert 2**20 < free_memory() < 2**45


def test_all_stages_get_the_same_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_size, "free_memory", lambda: 10_000)
    # A limit a stage counts against the dearest stage.
    assert (
        choose_num_blocks(
            [10, 30], 16, 32, 256, per_stage_limit=3000, share_of_free=0.5, promised=0
        )
        == 100
    )
    # A share of what is free counts against all stages of the machine together.
    assert (
        choose_num_blocks(
            [10, 30], 16, 32, 256, per_stage_limit=None, share_of_free=0.5, promised=0
        )
        == 125
    )
    # More than all sequences can use is of no use.
    assert (
        choose_num_blocks([10, 30], 16, 32, 3, per_stage_limit=None, share_of_free=0.5, promised=0)
        == 6
    )


def test_a_cache_without_room_for_one_sequence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_size, "free_memory", lambda: 10_000)
    with pytest.raises(StartError, match=r"--max-model-len 5000.* --gpu-memory-utilization"):
        choose_num_blocks(
            [10, 30], 16, 5000, 256, per_stage_limit=None, share_of_free=0.5, promised=0
        )
    with pytest.raises(StartError, match="lower --kv-cache-memory"):
        choose_num_blocks(
            [10, 30], 16, 32, 256, per_stage_limit=6000, share_of_free=0.5, promised=0
        )
