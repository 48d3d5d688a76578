"""Memory that weights and caches are taken from."""

import pytest
import torch

from headrace.kernels.memory import Arena, zeros


@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (1 << 20, 3)])
def test_zeros_are_zeros_of_the_shape_and_begin_a_cache_line(shape: tuple[int, ...]) -> None:
    found = zeros(shape, torch.bfloat16)
    assert torch.equal(found, torch.zeros(shape, dtype=torch.bfloat16))
    assert found.data_ptr() % 64 == 0


def test_pieces_of_an_arena_do_not_overlap_and_begin_cache_lines() -> None:
    arena = Arena()
    # The last is larger than a chunk; the one after it has room beside the others no more.
    counts = [1, 33, 1000, 20 << 20, 7]
    pieces = [arena.take(count, torch.float32).fill_(n) for n, count in enumerate(counts)]
    for n, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
        assert piece.shape == (count,)
        assert piece.data_ptr() % 64 == 0
        assert (piece == n).all()
