"""Native norms, activations and gathers against their torch references."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels import reference
from headrace.kernels.elementwise import (
    activate_and_multiply,
    add_rms_norm,
    embed,
    head_norm,
    rms_norm,
    soft_cap,
)
from kernels.bounds import assert_guards_untouched, assert_within, guarded, room, roundoff

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
EPSILON = 1e-5
ROWS, WIDTHS = st.integers(1, 20), st.integers(1, 70) | st.integers(71, 1100)
# Each beside ordinary numbers: no overflow but its own, so no order of sums matters.
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1e30, 3e38, -3e38, torch.inf, -torch.inf, torch.nan]


def numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


def with_specials(x: torch.Tensor) -> torch.Tensor:
    """A row for each special number, at a place of its own."""
    x = x.clone()
    for row, special in enumerate(SPECIAL):
        x[row, row * 7 % x.shape[1]] = special
    return x


def norm_error(dtype: torch.dtype, expected: torch.Tensor, width: int) -> torch.Tensor:
    """Sums of squares in another order, four or more chains of them; after that the normed number
    may be rounded to the dtype the other way, before the weight multiplies it."""
    relative = (width / 4 + 8) * roundoff(torch.float32)
    if dtype != torch.float32:
        relative += 2 * roundoff(dtype)
    return relative * expected.double().abs().nan_to_num(0.0, 0.0, 0.0)


@DTYPES
@given(rows=ROWS, width=WIDTHS, delta=st.booleans(), seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_native_norms_equal_the_reference(
    native_path: str, dtype: torch.dtype, rows: int, width: int, delta: bool, seed: int
) -> None:
    x, weight = numbers((rows, width), seed, dtype), numbers((width,), seed + 1, dtype)
    added = numbers((rows, width), seed + 2, dtype)
    found, out = guarded(x), room(rows, width, dtype=dtype)
    if delta:
        x += added
        assert add_rms_norm(found, guarded(added), guarded(weight), EPSILON, out) is out
    else:
        assert rms_norm(found, guarded(weight), EPSILON, out) is out
    expected = reference.rms_norm(x, weight, EPSILON)
    assert_within(out, expected, norm_error(dtype, expected, width))
    assert torch.equal(found, x)
    assert_guards_untouched(found, out)


@DTYPES
@pytest.mark.parametrize("width", [10, 33, 64])
def test_native_norms_of_special_numbers_equal_the_reference(
    native_path: str, dtype: torch.dtype, width: int
) -> None:
    x = with_specials(numbers((len(SPECIAL), width), 1, dtype))
    delta = with_specials(numbers((len(SPECIAL), width), 2, dtype).flip(0)).flip(0)
    weight = numbers((width,), 3, dtype)
    expected = reference.rms_norm(x, weight, EPSILON)
    out = room(*x.shape, dtype=dtype)
    rms_norm(x, weight, EPSILON, out)
    assert_within(out, expected, norm_error(dtype, expected, width))
    found = x.clone()
    add_rms_norm(found, delta, weight, EPSILON, out)
    added = x + delta
    assert torch.equal(found.nan_to_num(7.0), added.nan_to_num(7.0))
    expected = reference.rms_norm(added, weight, EPSILON)
    assert_within(out, expected, norm_error(dtype, expected, width))


@DTYPES
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-45, 1e18])
def test_native_norms_of_rows_that_are_all_alike_equal_the_reference(
    native_path: str, dtype: torch.dtype, value: float
) -> None:
    x, weight = torch.full((3, 45), value).to(dtype), numbers((45,), 1, dtype)
    out = room(3, 45, dtype=dtype)
    expected = reference.rms_norm(x, weight, EPSILON)
    assert_within(rms_norm(x, weight, EPSILON, out), expected, norm_error(dtype, expected, 45))


def silu_error(expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The exponential within two roundings, a sum, a quotient, a product; SiLU is rounded to the
    dtype before it is multiplied."""
    relative = 6 * roundoff(torch.float32) + roundoff(dtype)
    return relative * expected.abs().nan_to_num(0.0, 0.0, 0.0)


@DTYPES
@given(rows=ROWS, width=WIDTHS, seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_native_silu_equals_the_reference(
    native_path: str, dtype: torch.dtype, rows: int, width: int, seed: int
) -> None:
    x = numbers((rows, 2 * width), seed, dtype)
    out = room(rows, width, dtype=dtype)
    assert activate_and_multiply(guarded(x), "silu", out) is out
    expected = reference.activate_and_multiply(x.double(), "silu")
    assert_within(out, expected, silu_error(expected, dtype))
    assert_guards_untouched(out)


@DTYPES
def test_native_silu_equals_the_reference_at_every_magnitude(
    native_path: str, dtype: torch.dtype
) -> None:
    sizes = torch.cat((torch.logspace(-44, 38, 2000), torch.linspace(0, 130, 2000)))
    gate = torch.cat((sizes, -sizes))[None]
    x = torch.cat((gate, torch.ones_like(gate)), -1).to(dtype)
    out = room(1, gate.shape[1], dtype=dtype)
    activate_and_multiply(guarded(x), "silu", out)
    expected = reference.activate_and_multiply(x.double(), "silu")
    # Where e^x leaves float32's range the result is 0 rather than the last small numbers.
    smallest = 100 * torch.finfo(torch.float32).smallest_normal
    assert_within(out, expected, silu_error(expected, dtype) + smallest)


@DTYPES
@pytest.mark.parametrize("width", [10, 33])
def test_native_silu_of_special_numbers_equals_the_reference(
    native_path: str, dtype: torch.dtype, width: int
) -> None:
    gate = with_specials(numbers((len(SPECIAL), width), 1, dtype))
    up = with_specials(numbers((len(SPECIAL), width), 2, dtype))
    for x in (torch.cat((gate, up), -1), torch.cat((gate, up.flip(0)), -1)):
        out = room(len(SPECIAL), width, dtype=dtype)
        activate_and_multiply(x, "silu", out)
        expected = reference.activate_and_multiply(x, "silu")
        assert_within(out, expected, silu_error(expected.double(), dtype) + 1e-36)


@DTYPES
@given(
    tokens=ROWS,
    before=st.integers(0, 3),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([1, 16, 33, 64, 256]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None)
def test_native_norms_of_heads_equal_the_reference_and_leave_other_heads_alone(
    native_path: str,
    dtype: torch.dtype,
    tokens: int,
    before: int,
    heads: int,
    head_dim: int,
    seed: int,
) -> None:
    x = guarded(numbers((tokens, before + heads + 2, head_dim), seed, dtype))
    old, weight = x.clone(), numbers((head_dim,), seed + 1, dtype)
    own = slice(before, before + heads)
    head_norm(x[:, own], guarded(weight), EPSILON)
    expected = reference.rms_norm(old[:, own], weight, EPSILON)
    assert_within(x[:, own], expected, norm_error(dtype, expected, head_dim))
    assert torch.equal(x[:, :before], old[:, :before])
    assert torch.equal(x[:, before + heads :], old[:, before + heads :])
    assert_guards_untouched(x)


@DTYPES
def test_native_gelu_equals_the_reference_at_every_magnitude(
    native_path: str, dtype: torch.dtype
) -> None:
    sizes = torch.cat((torch.logspace(-37, 4, 2000), torch.linspace(0, 12, 2001)))
    gate = torch.cat((sizes, -sizes))[None]
    x = torch.cat((gate, torch.ones_like(gate)), -1).to(dtype)
    out = room(1, gate.shape[1], dtype=dtype)
    assert activate_and_multiply(guarded(x), "gelu_tanh", out) is out
    wide = x.double()
    expected = reference.activate_and_multiply(wide, "gelu_tanh")
    # The argument of the exponential, some 1.6 x + 0.07 x^3, is off by a few roundings of itself.
    g = wide[:, : gate.shape[1]].abs()
    relative = (8 + 8 * (1.6 * g + 0.0714 * g**3)) * roundoff(torch.float32) + roundoff(dtype)
    # Far below zero the reference is the difference of two numbers near 1.
    least = g * 2e-16 + 100 * torch.finfo(torch.float32).smallest_normal
    assert_within(out, expected, relative * expected.abs() + least)
    assert_guards_untouched(out)


@DTYPES
@pytest.mark.parametrize("cap", [0.5, 30.0, 50.0])
def test_native_soft_caps_equal_the_reference_at_every_magnitude(
    native_path: str, dtype: torch.dtype, cap: float
) -> None:
    sizes = torch.cat((torch.logspace(-37, 38, 2001), torch.linspace(0, 500, 2000)))
    x = guarded(torch.cat((sizes, -sizes, torch.tensor([torch.inf, -torch.inf]))).to(dtype))
    expected = cap * torch.tanh(x.double() / cap)
    soft_cap(x, cap)
    assert_within(x, expected, 8 * roundoff(torch.float32) * expected.abs())
    assert_guards_untouched(x)


@DTYPES
def test_native_embedding_scales_rows_by_the_scale_as_the_dtype_has_it(
    native_path: str, dtype: torch.dtype
) -> None:
    table, ids = numbers((13, 33), 1, dtype), torch.tensor([3, 0, 12, 3])
    out = room(4, 33, dtype=dtype)
    scale = 45.254833995939045
    embed(ids, guarded(table), scale, out)
    assert torch.equal(out, reference.embed(ids, table, scale))
    assert_guards_untouched(out)


@DTYPES
@given(width=st.integers(1, 100), ids=st.lists(st.integers(0, 12), min_size=1, max_size=40))
@settings(max_examples=15, deadline=None)
def test_native_embedding_equals_torch(
    native_path: str, dtype: torch.dtype, width: int, ids: list[int]
) -> None:
    table = with_specials(numbers((13, width), 1, dtype))
    tokens = torch.tensor(ids)
    out = room(len(ids), width, dtype=dtype)
    assert embed(tokens, guarded(table), 1.0, out) is out
    assert torch.equal(out.view(torch.uint8), F.embedding(tokens, table).view(torch.uint8))
    assert_guards_untouched(out)


@DTYPES
def test_rms_norm_equals_transformers(any_path: str, dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = LlamaRMSNorm(48, eps=EPSILON)
    torch.nn.init.uniform_(theirs.weight)
    theirs = theirs.to(dtype)
    x = (torch.randn(7, 48) * 30).to(dtype)
    with torch.no_grad():
        expected = theirs(x)
        assert torch.equal(reference.rms_norm(x, theirs.weight, EPSILON), expected)
        found = rms_norm(x, theirs.weight, EPSILON, torch.empty_like(x))
    assert_within(found, expected, norm_error(dtype, expected, 48))


def test_silu_and_multiply_takes_the_gate_from_the_first_half(any_path: str) -> None:
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    found = activate_and_multiply(torch.cat((gate, up), -1), "silu", torch.empty(3, 8))
    torch.testing.assert_close(found, F.silu(gate) * up)
