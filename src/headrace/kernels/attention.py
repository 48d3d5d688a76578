"""Attention over the paged KV cache: the interface that a native kernel takes over."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class AttentionBatch:
    """Where the rows of one step lie in the cache. R rows, T tokens, all int64.

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


def write_kv(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch
) -> None:
    """Put a step's keys and values, each [T, kv_heads, head_dim], into the layer's cache.

    cache: [2, blocks, block_size, kv_heads, head_dim], keys first.
    """
    cache[0].flatten(0, 1)[batch.cache_index] = key
    cache[1].flatten(0, 1)[batch.cache_index] = value


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal grouped-query attention of a step's tokens over their sequences' cached positions.

    query: [T, heads, head_dim]; cache as in write_kv, already holding this step. A token at
    position p attends to positions p - sliding_window + 1 to p, or 0 to p without a window.
    Returns [T, heads, head_dim].
    """
    output = torch.empty_like(query)
    starts = batch.query_starts.tolist()
    # Rows that are worked on at once are padded to the longest: by powers of two, no row is padded
    # to more than twice its length.
    singles: dict[int, list[int]] = {}
    for r, length in enumerate(batch.query_lens):
        if length == 1:
            singles.setdefault(batch.context_list[r].bit_length(), []).append(r)
    for rows in singles.values():
        tokens = [starts[r] for r in rows]
        output[tokens] = _attend_single(query[tokens], cache, batch, rows, scale, sliding_window)
    for r, length in enumerate(batch.query_lens):
        if length > 1:
            chunk = slice(starts[r], starts[r + 1])
            output[chunk] = _attend_chunk(query[chunk], cache, batch, r, scale, sliding_window)
    return output


def _attend_single(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    rows: list[int],
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Rows of one token each, all at once: query [R, heads, head_dim]."""
    longest = max(batch.context_list[r] for r in rows)
    block_size = cache.shape[2]
    tables = batch.block_tables[rows, : -(-longest // block_size)]
    keys, values = cache[0][tables].flatten(1, 2), cache[1][tables].flatten(1, 2)
    lengths = batch.context_lens[rows, None]
    places = torch.arange(keys.shape[1], device=query.device)
    visible = places < lengths
    if sliding_window is not None:
        visible &= places >= lengths - sliding_window
    # Places behind a row's end belong to others, and a masked infinity would still make a NaN.
    hidden = ~visible[:, :, None, None]
    keys.masked_fill_(hidden, 0)
    values.masked_fill_(hidden, 0)
    attended = F.scaled_dot_product_attention(
        query.unsqueeze(2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=visible[:, None, None, :],
        scale=scale,
        enable_gqa=True,
    )
    return attended.squeeze(2)


def _attend_chunk(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    row: int,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """One row's chunk of several tokens: query [t, heads, head_dim]."""
    context = batch.context_list[row]
    block_size = cache.shape[2]
    table = batch.block_tables[row, : -(-context // block_size)]
    keys = cache[0][table].flatten(0, 1)[:context]
    values = cache[1][table].flatten(0, 1)[:context]
    places = torch.arange(context, device=query.device)
    own = places[context - len(query) :, None]
    visible = places <= own
    if sliding_window is not None:
        visible &= places > own - sliding_window
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=visible,
        scale=scale,
        enable_gqa=True,
    )
    return attended.squeeze(0).transpose(0, 1)
