import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.attention import AttentionBatch, paged_attention, write_kv
from headrace.kernels.elementwise import rms_norm, rotate, silu_and_multiply


def plain_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, window: int | None
) -> torch.Tensor:
    """The definition, token by token and head by head. query [t, H, D], keys [n, K, D]."""
    tokens, heads, size = query.shape
    output = torch.empty_like(query)
    for t in range(tokens):
        position = first + t
        start = 0 if window is None else max(0, position - window + 1)
        for h in range(heads):
            shared = h * keys.shape[1] // heads
            scores = keys[start : position + 1, shared] @ query[t, h] / math.sqrt(size)
            output[t, h] = torch.softmax(scores, 0) @ values[start : position + 1, shared]
    return output


@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 4, 16]),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    window=st.none() | st.integers(1, 12),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_paged_attention_is_attention_over_each_rows_own_past(
    rows: list[tuple[int, int]],
    block_size: int,
    groups: int,
    kv_heads: int,
    window: int | None,
    seed: int,
) -> None:
    """rows: (positions already cached, tokens of this step) of each sequence."""
    generator = torch.Generator().manual_seed(seed)
    heads, size = groups * kv_heads, 8
    lengths = [past + new for past, new in rows]
    needed = [-(-length // block_size) for length in lengths]
    shuffled = torch.randperm(sum(needed) + 3, generator=generator)
    tables = torch.zeros(len(rows), max(needed), dtype=torch.int64)
    used = 0
    for row, count in enumerate(needed):
        tables[row, :count] = shuffled[used : used + count]
        used += count
    keys = [torch.randn(n, kv_heads, size, generator=generator) for n in lengths]
    values = [torch.randn(n, kv_heads, size, generator=generator) for n in lengths]
    # What lies in blocks of others, or behind a row's end, must not matter.
    cache = torch.full((2, sum(needed) + 3, block_size, kv_heads, size), torch.inf)

    def index(row: int, positions: torch.Tensor) -> torch.Tensor:
        return tables[row, positions // block_size] * block_size + positions % block_size

    for row, (past, _) in enumerate(rows):
        places = index(row, torch.arange(past))
        cache[0].flatten(0, 1)[places] = keys[row][:past]
        cache[1].flatten(0, 1)[places] = values[row][:past]
    positions = [torch.arange(past, past + new) for past, new in rows]
    news = torch.tensor([new for _, new in rows])
    batch = AttentionBatch(
        positions=torch.cat(positions),
        cache_index=torch.cat([index(row, p) for row, p in enumerate(positions)]),
        block_tables=tables,
        query_starts=torch.cat((torch.zeros(1, dtype=torch.int64), news.cumsum(0))),
        context_lens=torch.tensor(lengths),
        query_lens=news.tolist(),
        context_list=lengths,
    )
    query = torch.randn(int(news.sum()), heads, size, generator=generator)
    write_kv(
        torch.cat([k[past:] for k, (past, _) in zip(keys, rows, strict=True)]),
        torch.cat([v[past:] for v, (past, _) in zip(values, rows, strict=True)]),
        cache,
        batch,
    )
    found = paged_attention(query, cache, batch, size**-0.5, window)
    parts = query.split(news.tolist())
    expected = [
        plain_attention(q, k, v, past, window)
        for q, k, v, (past, _) in zip(parts, keys, values, rows, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(expected), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    reference = LlamaRMSNorm(48, eps=1e-5)
    torch.nn.init.uniform_(reference.weight)
    reference = reference.to(dtype)
    x = (torch.randn(7, 48) * 30).to(dtype)
    with torch.no_grad():
        assert torch.equal(rms_norm(x, reference.weight, 1e-5), reference(x))


def test_rotation_equals_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    angles = torch.rand(5, 8) * 6
    wide = torch.cat((angles, angles), -1)
    expected_q, expected_k = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], wide.cos()[None], wide.sin()[None]
    )
    torch.testing.assert_close(rotate(q, angles.cos(), angles.sin()), expected_q[0].transpose(0, 1))
    torch.testing.assert_close(rotate(k, angles.cos(), angles.sin()), expected_k[0].transpose(0, 1))


def test_silu_and_multiply_takes_the_gate_from_the_first_half() -> None:
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(silu_and_multiply(torch.cat((gate, up), -1)), expected)
