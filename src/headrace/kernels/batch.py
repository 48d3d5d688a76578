"""Where the rows of a step lie in the cache: what attention needs besides tensors of the model."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """R rows, T tokens; all tensors int64 and contiguous.

    positions [T]: each token's position in its sequence.
    cache_index [T]: the place of each token in the cache, block * block_size + offset.
    block_tables [R, B]: each row's blocks, padded with block 0.
    query_starts [R + 1]: row r's tokens are query_starts[r] up to query_starts[r + 1].
    context_lens [R]: positions of row r that are in the cache once this step's are written.
    query_lens, context_list: the same lengths on the host, so that shapes need no device sync.
    """

    positions: torch.Tensor
    cache_index: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    query_lens: list[int]
    context_list: list[int]
