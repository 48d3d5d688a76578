"""Attention over the paged KV cache, and what fills the cache."""

import torch

from headrace.kernels import path, reference
from headrace.kernels.batch import AttentionBatch
from headrace.kernels.kv_cache import KvCache


def rotate_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    cache: KvCache,
    batch: AttentionBatch,
) -> None:
    """Rotary embedding of a step's queries, in place, and of its keys; keys and values go to the
    cache.

    qkv: [T, heads + 2 kv_heads, head_dim], contiguous: queries, keys, values. cos, sin: float32
    [positions, head_dim / 2], or None to leave them as they are. What the keys' part of qkv holds
    afterwards is undefined.
    """
    if not runs_native(qkv.device, qkv.dtype, cache.head_dim):
        reference.rotate_and_write(qkv, cos, sin, cache, batch)
        return
    assert qkv.is_contiguous()
    path.native.rotate_and_write(
        qkv.data_ptr(),
        0 if cos is None else cos.data_ptr(),
        0 if sin is None else sin.data_ptr(),
        batch.positions.data_ptr(),
        batch.cache_index.data_ptr(),
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        qkv.shape[0],
        qkv.shape[1] - 2 * cache.kv_heads,
        cache.block_size,
        cache.block_rows,
        cache.kv_heads,
        cache.head_dim,
        qkv.dtype == torch.bfloat16,
    )


def paged_attention(
    qkv: torch.Tensor,
    cache: KvCache,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    soft_cap: float | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Causal grouped-query attention of a step's tokens over their sequences' cached positions.

    qkv: [T, heads + 2 kv_heads, head_dim] after rotate_and_write, of which the queries are read;
    the cache holds this step. A token at position p attends to positions p - sliding_window + 1 to
    p, or 0 to p without a window. sinks: float32 [heads], a score for each head that takes part in
    its softmax without a value (gpt-oss). soft_cap: scores become soft_cap * tanh(score / soft_cap)
    (Gemma 2). Fills and returns out [T, heads, head_dim], contiguous.
    """
    if not runs_native(qkv.device, qkv.dtype, cache.head_dim):
        query = qkv[:, : out.shape[1]]
        return out.copy_(
            reference.paged_attention(query, cache, batch, scale, sliding_window, sinks, soft_cap)
        )
    assert out.is_contiguous()
    path.native.attention(
        qkv.data_ptr(),
        qkv.stride(0),
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.block_tables.shape[1],
        batch.query_starts.data_ptr(),
        batch.context_lens.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        len(batch.query_lens),
        out.shape[1],
        sliding_window or 0,
        scale,
        soft_cap or 0.0,
        cache.block_size,
        cache.block_rows,
        cache.kv_heads,
        cache.head_dim,
        qkv.dtype == torch.bfloat16,
    )
    return out


def runs_native(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether native kernels take heads of such a width: whole vectors of the widest path."""
    return head_dim % 16 == 0 and path.runs_native(device, dtype)
