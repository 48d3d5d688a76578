"""Native attention against its torch reference, and the reference against the definition."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.kernels import attention, path, reference
from headrace.kernels.kv_cache import KvCache, new_cache, read, write
from kernels.bounds import assert_guards_untouched, assert_within, guarded, room, roundoff
from kernels.paged import Part, Sequences, sequences

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Positions already cached, and tokens of this step: a decode row, or a chunk of a prompt.
ROWS = st.lists(
    st.tuples(st.integers(0, 50), st.just(1) | st.integers(1, 20)), min_size=1, max_size=4
)


def filled(rows: Sequences, parts: list[Part], dtype: torch.dtype) -> KvCache:
    """A cache with all that these parts attend to."""
    cache = rows.cache(dtype)
    rows.write(cache, [(row, 0, start + count) for row, start, count in parts])
    return cache


def native_attention(
    rows: Sequences,
    parts: list[Part],
    window: int | None,
    sinks: torch.Tensor | None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    qkv = rows.tokens(parts)
    # Keys and values are in the cache; their place beside the queries holds anything.
    qkv[:, rows.heads :] = torch.nan
    cache, batch = filled(rows, parts, qkv.dtype), rows.batch(parts)
    out = room(len(qkv), rows.heads, rows.head_dim, dtype=qkv.dtype)
    scale = rows.head_dim**-0.5
    attention.paged_attention(guarded(qkv), cache, batch, scale, window, sinks, soft_cap, out)
    assert_guards_untouched(out)
    return out


def wide_reference(
    rows: Sequences,
    parts: list[Part],
    window: int | None,
    sinks: torch.Tensor | None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """In float32, whatever the dtype: its own error is as small as the kernels'."""
    query = rows.tokens(parts)[:, : rows.heads].float()
    cache, batch = filled(rows, parts, torch.float32), rows.batch(parts)
    scale = rows.head_dim**-0.5
    return reference.paged_attention(query, cache, batch, scale, window, sinks, soft_cap)


def error_bound(rows: Sequences) -> float:
    """What native attention and the reference may differ by, before the result is rounded.

    An error e of a score changes its weight by a factor 1 + e. A sum of n terms is off by some
    sqrt(n) roundings; the tail of that is what the factor 4 is for.
    """
    all_rows = torch.cat(rows.qkv).float()
    query, key, value = all_rows.split([rows.heads, *[rows.kv_heads] * 2], dim=1)
    score = float(query.norm(dim=-1).max() * key.norm(dim=-1).max()) * rows.head_dim**-0.5
    longest = max(len(x) for x in rows.qkv)
    roundings = math.sqrt(rows.head_dim) * (1 + score) + math.sqrt(longest)
    return float(4 * roundoff(torch.float32) * roundings * value.abs().max())


@DTYPES
@given(
    steps=ROWS,
    block_size=st.sampled_from([1, 3, 4, 16, 20, 32]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7, 8]),
    head_dim=st.sampled_from([16, 48, 64, 80, 128]),
    window=st.none() | st.integers(1, 50),
    sinks=st.booleans(),
    soft_cap=st.none() | st.floats(0.1, 60),
    seed=st.integers(0, 1000),
)
@example([(0, 1)], 16, 1, 1, 16, None, False, None, 0)
@example([(0, 1)] * 30, 16, 3, 3, 64, None, False, None, 0)
@example([(37, 30), (5, 1), (0, 61)], 3, 2, 7, 80, 9, True, None, 0)
@example([(37, 30), (5, 1), (0, 61)], 3, 2, 7, 80, 9, False, 1.5, 0)
@settings(max_examples=16, deadline=None)
def test_native_attention_equals_the_reference_whatever_lies_in_blocks_of_others(
    native_path: str,
    dtype: torch.dtype,
    steps: list[tuple[int, int]],
    block_size: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    window: int | None,
    sinks: bool,
    soft_cap: float | None,
    seed: int,
) -> None:
    rows = sequences(
        [past + new for past, new in steps],
        block_size=block_size, kv_heads=kv_heads, group=group, head_dim=head_dim,
        dtype=dtype, seed=seed,
    )  # fmt: skip
    parts = [(row, past, new) for row, (past, new) in enumerate(steps)]
    scores = torch.linspace(-3, 3, rows.heads) if sinks else None
    found = native_attention(rows, parts, window, scores, soft_cap)
    expected = wide_reference(rows, parts, window, scores, soft_cap)
    assert_within(found, expected, error_bound(rows))


@DTYPES
@pytest.mark.parametrize("window", [None, 4096])
def test_native_attention_over_thousands_of_positions_equals_the_reference(
    native_path: str, dtype: torch.dtype, window: int | None
) -> None:
    rows = sequences([5000, 4990, 3], block_size=16, group=2, head_dim=64, dtype=dtype)
    parts = [(0, 4999, 1), (1, 4977, 13), (2, 2, 1)]
    found = native_attention(rows, parts, window, None)
    assert_within(found, wide_reference(rows, parts, window, None), error_bound(rows))


@DTYPES
def test_scores_near_the_largest_number_give_all_weight_to_the_best_position(
    native_path: str, dtype: torch.dtype
) -> None:
    rows = sequences([40], block_size=16, group=3, head_dim=64, dtype=dtype)
    qkv = rows.qkv[0]
    qkv[:, 3] *= 2.0**110
    query, key, value = qkv.float().split([3, 1, 1], dim=1)
    best = (query[-1].double() @ key[:, 0].double().T).argmax(dim=1)
    found = native_attention(rows, [(0, 39, 1)], None, None)
    assert torch.equal(found[0].float(), value[best, 0])


@DTYPES
@pytest.mark.parametrize("scale", [2.0**-130, 2.0**115])
def test_tiny_and_huge_values_are_averaged(
    native_path: str, dtype: torch.dtype, scale: float
) -> None:
    rows = sequences([33, 20], block_size=16, group=2, head_dim=16, dtype=dtype)
    for qkv in rows.qkv:
        qkv[:, -1] *= scale
    parts = [(0, 32, 1), (1, 12, 8)]
    found = native_attention(rows, parts, None, None)
    # A number below the normal ones is rounded to a multiple of the smallest, in each of the sums;
    # the CPU's own products of bfloat16 take it for 0.
    takes_zero = dtype == torch.bfloat16 and path.native.multiplies_bfloat16()
    denormal = (2.0**-126 if takes_zero else 2.0**-149) * 33 if scale < 1 else 0.0
    expected = wide_reference(rows, parts, None, None)
    assert_within(found, expected, error_bound(rows) + denormal)


@DTYPES
@given(
    tokens=st.integers(1, 40),
    block_size=st.sampled_from([1, 3, 4, 16, 20, 32]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([16, 48, 64, 80, 128]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=10, deadline=None)
def test_native_rotation_and_write_equal_the_reference_and_touch_no_other_place(
    native_path: str,
    dtype: torch.dtype,
    tokens: int,
    block_size: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    seed: int,
) -> None:
    rows = sequences(
        [tokens + 5, 9],
        block_size=block_size, kv_heads=kv_heads, group=group, head_dim=head_dim,
        dtype=dtype, seed=seed,
    )  # fmt: skip
    parts = [(1, 8, 1), (0, 5, tokens)]
    angles = torch.rand(tokens + 9, head_dim // 2) * 6
    cos, sin = guarded(angles.cos()), guarded(angles.sin())
    qkv, batch, cache = rows.tokens(parts), rows.batch(parts), rows.cache()
    wide, wide_cache = qkv.to(torch.float32, copy=True), rows.cache(torch.float32)
    reference.rotate_and_write(wide, cos, sin, wide_cache, batch)
    # Either rounds two products and their sum, none larger than sqrt(2) times the largest element.
    error = 6 * roundoff(torch.float32) * float(qkv.abs().max())

    found = guarded(qkv)
    attention.rotate_and_write(found, cos, sin, cache, batch)
    assert_within(found[:, : rows.heads], wide[:, : rows.heads], error)
    assert_guards_untouched(found)
    every_block, written = torch.arange(len(cache.keys)), batch.cache_index
    keys, values = (x[written] for x in read(cache, every_block))
    wide_keys, _ = read(wide_cache, every_block)
    assert_within(keys, wide_keys[written], error)
    assert torch.equal(values, qkv[:, rows.heads + kv_heads :])
    untouched = rows.cache()
    write(untouched, written, keys, values)
    assert torch.equal(cache.keys.nan_to_num(7.0), untouched.keys.nan_to_num(7.0))
    assert torch.equal(cache.values.nan_to_num(7.0), untouched.values.nan_to_num(7.0))


def test_rotated_infinities_and_numbers_without_a_value_equal_the_reference(
    native_path: str,
) -> None:
    rows = sequences([17], block_size=16, kv_heads=1, group=2, head_dim=48, dtype=torch.float32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 3e38, 1e-45, 1.0])
    qkv = special[torch.arange(rows.qkv[0].numel()) % 7].view(rows.qkv[0].shape)
    angles = torch.rand(17, 24) * 6
    batch = rows.batch([(0, 0, 17)])
    expected, found = qkv.clone(), qkv.clone()
    reference.rotate_and_write(expected, angles.cos(), angles.sin(), rows.cache(), batch)
    attention.rotate_and_write(found, angles.cos(), angles.sin(), rows.cache(), batch)
    error = 6 * roundoff(torch.float32) * 3e38
    assert_within(found[:, :2], expected[:, :2], error)


@DTYPES
@given(block_size=st.integers(1, 40), head_dim=st.sampled_from([2, 8, 16]), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_what_is_written_to_a_cache_is_read_in_order(
    dtype: torch.dtype, block_size: int, head_dim: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache = new_cache(5, block_size, 3, head_dim, dtype, torch.device("cpu"))
    tables = torch.randperm(5, generator=generator)[:3]
    count = 3 * block_size
    keys, values = torch.randn(2, count, 3, head_dim, generator=generator).to(dtype)
    places = torch.arange(count)
    index = tables[places // block_size] * block_size + places % block_size
    order = torch.randperm(count, generator=generator)
    write(cache, index[order], keys[order], values[order])
    found_keys, found_values = read(cache, tables)
    assert torch.equal(found_keys, keys)
    assert torch.equal(found_values, values)


def plain_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    window: int | None,
    sinks: torch.Tensor | None,
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
            if sinks is not None:
                scores = torch.cat((scores, sinks[h, None]))
            weights = torch.softmax(scores, 0)[: position + 1 - start]
            output[t, h] = weights @ values[start : position + 1, shared]
    return output


@given(
    steps=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 4, 16]),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    window=st.none() | st.integers(1, 12),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_the_reference_is_attention_over_each_rows_own_past(
    steps: list[tuple[int, int]],
    block_size: int,
    group: int,
    kv_heads: int,
    window: int | None,
    sinks: bool,
    seed: int,
) -> None:
    """Heads of 8 elements, which no native kernel takes: through the same function."""
    rows = sequences(
        [past + new for past, new in steps],
        block_size=block_size, kv_heads=kv_heads, group=group, head_dim=8,
        dtype=torch.float32, seed=seed,
    )  # fmt: skip
    parts = [(row, past, new) for row, (past, new) in enumerate(steps)]
    scores = torch.linspace(-3, 3, rows.heads) if sinks else None
    expected = []
    for qkv, (past, _) in zip(rows.qkv, steps, strict=True):
        query, keys, values = qkv.split([rows.heads, kv_heads, kv_heads], dim=1)
        expected.append(plain_attention(query[past:], keys, values, past, window, scores))
    found = native_attention(rows, parts, window, scores)
    assert_within(found, torch.cat(expected), error_bound(rows))


@DTYPES
def test_rotation_equals_transformers(any_path: str, dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    rows = sequences([5], block_size=16, kv_heads=2, group=2, head_dim=32, dtype=dtype)
    qkv, batch, cache = rows.qkv[0].clone(), rows.batch([(0, 0, 5)]), rows.cache()
    angles = torch.rand(5, 16) * 6
    wide = torch.cat((angles, angles), -1).to(dtype)[None]
    query, key, value = qkv.transpose(0, 1).split([4, 2, 2])
    expected = apply_rotary_pos_emb(query[None], key[None], wide.cos(), wide.sin())
    attention.rotate_and_write(qkv, wide[0, :, :16].float().cos(), wide[0, :, :16].float().sin(),
                               cache, batch)  # fmt: skip
    keys, values = read(cache, batch.block_tables[0])
    # Theirs rounds the angles' cosine and sine, two products and a sum to the dtype.
    error = 5 * roundoff(dtype) * float(rows.qkv[0].abs().max())
    assert_within(qkv[:, :4], expected[0][0].transpose(0, 1), error)
    assert_within(keys[:5], expected[1][0].transpose(0, 1), error)
    assert torch.equal(values[:5], value.transpose(0, 1))
