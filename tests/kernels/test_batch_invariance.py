"""By native kernels a row's result is the same, bit for bit, whatever else is in its batch."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.attention import paged_attention, rotate_and_write
from headrace.kernels.elementwise import activate_and_multiply, head_norm, rms_norm, soft_cap
from headrace.kernels.linear import Linear
from kernels.paged import Part, Sequences, sequences

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def product(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    return layer(x.contiguous(), torch.empty(len(x), layer.out_features, dtype=x.dtype))


@DTYPES
@pytest.mark.parametrize(("outs", "ins"), [(40, 64), (161, 333), (1, 7), (96, 2048)])
def test_a_product_of_the_first_rows_is_that_of_all(
    native_path: str, dtype: torch.dtype, outs: int, ins: int
) -> None:
    layer = Linear(torch.randn(outs, ins), torch.randn(outs), dtype)
    x = torch.randn(75, ins).to(dtype)
    whole = product(layer, x)
    for rows in (*range(1, 27), 37, 48, 74):
        assert torch.equal(product(layer, x[:rows]), whole[:rows]), rows


@DTYPES
@given(
    outs=st.integers(1, 120),
    ins=st.integers(1, 120),
    chosen=st.lists(st.integers(0, 29), min_size=1, max_size=40),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None)
def test_a_rows_product_does_not_depend_on_the_other_rows(
    native_path: str, dtype: torch.dtype, outs: int, ins: int, chosen: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = Linear(torch.randn(outs, ins, generator=generator), None, dtype)
    x = torch.randn(30, ins, generator=generator).to(dtype)
    assert torch.equal(product(layer, x[chosen]), product(layer, x)[chosen])


@DTYPES
def test_a_rows_norm_and_activation_do_not_depend_on_the_other_rows(
    native_path: str, dtype: torch.dtype
) -> None:
    # So many that threads share them.
    x, weight = torch.randn(40, 1002).to(dtype), torch.randn(1002).to(dtype)
    normed = rms_norm(x, weight, 1e-5, torch.empty_like(x))
    multiplied = activate_and_multiply(x, "silu", x.new_empty(40, 501))
    for row in range(40):
        alone = x[row : row + 1]
        assert torch.equal(rms_norm(alone, weight, 1e-5, torch.empty_like(alone))[0], normed[row])
        assert torch.equal(
            activate_and_multiply(alone, "silu", x.new_empty(1, 501))[0], multiplied[row]
        )


@DTYPES
def test_a_tokens_head_norm_gate_and_cap_do_not_depend_on_the_other_tokens(
    native_path: str, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(40, 5, 64).to(dtype), torch.randn(64).to(dtype)
    normed, capped = x.clone(), x.clone()
    head_norm(normed[:, 1:4], weight, 1e-6)
    soft_cap(capped, 1.5)
    gated = activate_and_multiply(x.flatten(1), "gelu_tanh", x.new_empty(40, 160))
    for token in range(40):
        own, other = x[token : token + 1].clone(), x[token : token + 1].clone()
        head_norm(own[:, 1:4], weight, 1e-6)
        soft_cap(other, 1.5)
        assert torch.equal(own[0], normed[token])
        assert torch.equal(other[0], capped[token])
        alone = activate_and_multiply(
            x[token : token + 1].flatten(1), "gelu_tanh", x.new_empty(1, 160)
        )
        assert torch.equal(alone[0], gated[token])


def attended(
    rows: Sequences, steps: list[list[Part]], window: int | None, sinks: torch.Tensor | None
) -> list[torch.Tensor]:
    """The attention of each sequence's tokens, in order, when the steps are computed in turn."""
    half = rows.head_dim // 2
    angles = torch.arange(len(max(rows.qkv, key=len)))[:, None] / 10 ** torch.linspace(0, 4, half)
    cache = rows.cache()
    found: list[list[torch.Tensor]] = [[] for _ in rows.qkv]
    for step in steps:
        batch, qkv = rows.batch(step), rows.tokens(step)
        rotate_and_write(qkv, angles.cos(), angles.sin(), cache, batch)
        out = qkv.new_empty(len(qkv), rows.heads, rows.head_dim)
        paged_attention(qkv, cache, batch, rows.head_dim**-0.5, window, sinks, None, out)
        for (row, *_), part in zip(step, out.split(batch.query_lens), strict=True):
            found[row].append(part)
    return [torch.cat(parts) for parts in found]


@st.composite
def chunkings(draw: st.DrawFn, lengths: list[int]) -> list[list[Part]]:
    """Steps that compute sequences of these lengths in chunks, several sequences at a time."""
    done = [0] * len(lengths)
    steps = []
    while unfinished := [row for row, length in enumerate(lengths) if done[row] < length]:
        chosen = draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True))
        step = []
        for row in chosen:
            left = lengths[row] - done[row]
            count = draw(st.just(1) | st.just(left) | st.integers(1, left))
            step.append((row, done[row], count))
            done[row] += count
        steps.append(step)
    return steps


@DTYPES
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 45), min_size=1, max_size=3),
    block_size=st.sampled_from([3, 16, 20]),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 4, 7]),
    head_dim=st.sampled_from([16, 48, 80]),
    window=st.none() | st.integers(1, 40),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=12, deadline=None)
def test_attention_does_not_depend_on_the_other_rows_or_on_how_a_prompt_is_cut(
    native_path: str,
    dtype: torch.dtype,
    data: st.DataObject,
    lengths: list[int],
    block_size: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    window: int | None,
    sinks: bool,
    seed: int,
) -> None:
    rows = sequences(
        lengths,
        block_size=block_size, kv_heads=kv_heads, group=group, head_dim=head_dim,
        dtype=dtype, seed=seed,
    )  # fmt: skip
    scores = torch.linspace(-3, 3, rows.heads) if sinks else None
    alone = attended(rows, [[(row, 0, n)] for row, n in enumerate(lengths)], window, scores)
    mixed = attended(rows, data.draw(chunkings(lengths)), window, scores)
    for one, other in zip(alone, mixed, strict=True):
        assert torch.equal(one, other)


@DTYPES
def test_attention_of_a_long_prompt_is_that_of_its_tokens_one_by_one(
    native_path: str, dtype: torch.dtype
) -> None:
    rows = sequences([150, 90], block_size=16, kv_heads=2, group=3, head_dim=64, dtype=dtype)
    together = attended(rows, [[(0, 0, 150), (1, 0, 90)]], None, None)
    one_by_one = [[(0, at, 1)] + [(1, at, 1)] * (at < 90) for at in range(150)]
    for one, other in itertools.zip_longest(together, attended(rows, one_by_one, None, None)):
        assert torch.equal(one, other)
