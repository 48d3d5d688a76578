"""Quantized products: packing against the gguf package, products against the reference."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gguf_blocks import random_rows
from headrace.kernels import reference
from headrace.kernels.quantized_form import FORMS
from headrace.kernels.quantized_linear import QuantizedLinear, QuantizedPart
from kernels.bounds import assert_guards_untouched, assert_within, guarded, room, roundoff

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
KINDS = pytest.mark.parametrize("kind", FORMS)
# Numbers of a super-block.
_SUPER = 256


def packed(kind: str, rows: np.ndarray, ins: int) -> QuantizedPart:
    part = QuantizedPart(kind, len(rows), ins)
    part.put(rows, torch.arange(len(rows)))
    return part


def values(part: QuantizedPart) -> torch.Tensor:
    """What the packed numbers stand for, float32 [outs, ins], by the embedding's kernel."""
    table = QuantizedLinear([part], None, torch.float32)
    out = torch.empty(part.outs, part.ins)
    return table.embed(torch.arange(part.outs), 1.0, out, first=0, vocab=part.outs)


def dequantized(kind: str, rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType[kind]))


def product(layer: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    out = room(len(x), layer.out_features, dtype=x.dtype)
    assert layer(guarded(x), out) is out
    assert_guards_untouched(out)
    return out


@KINDS
@pytest.mark.parametrize(("outs", "ins"), [(1, 256), (37, 512), (16, 768)])
def test_packed_numbers_are_the_files_or_within_a_rounding_of_scales_to_float16(
    native_path: str, kind: str, outs: int, ins: int
) -> None:
    rows = random_rows(kind, outs, ins)
    expected, found = dequantized(kind, rows), values(packed(kind, rows, ins))
    if not kind.endswith("_K"):
        assert torch.equal(found, expected)
        return
    # A scale's relative error is 2^-11, or 2^-25 where it has no 11 bits; a minimum's as well. The
    # largest that is multiplied: 31 by Q5_K's.
    scaled = expected.unflatten(1, (-1, 16)).abs().amax(-1, keepdim=True)
    minimum = torch.zeros(()) if kind == "Q6_K" else torch.tensor(0.0012 * 5 * 63)
    error = 2.0**-11 * (scaled + 2 * minimum) + 33 * 2.0**-25
    assert_within(
        found.unflatten(1, (-1, 16)), expected.unflatten(1, (-1, 16)).double(), error.double()
    )


@pytest.mark.parametrize("kind", [kind for kind in FORMS if not kind.endswith("_K")])
def test_the_smallest_scales_are_packed_exactly(native_path: str, kind: str) -> None:
    rows = random_rows(kind, 20, _SUPER)
    # Float16's below the normal ones, of either sign.
    blocks = rows.reshape(20, _SUPER // 32, -1)
    blocks[:, :, 1] &= 0x83
    assert torch.equal(values(packed(kind, rows, _SUPER)), dequantized(kind, rows))


@KINDS
@given(
    outs=st.integers(1, 70),
    ranges=st.lists(st.tuples(st.integers(0, 23), st.integers(0, 23)), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=10, deadline=None)
def test_columns_in_blocks_of_32_and_rows_in_any_order_are_packed_as_of_the_whole(
    native_path: str, kind: str, outs: int, ranges: list[tuple[int, int]], seed: int
) -> None:
    rows = random_rows(kind, outs, 3 * _SUPER, seed)
    whole = values(packed(kind, rows, 3 * _SUPER))
    ordered = [(32 * min(pair), 32 * max(pair) + 32) for pair in ranges]
    part = QuantizedPart(kind, outs, sum(end - first for first, end in ordered))
    places = torch.randperm(outs, generator=torch.Generator().manual_seed(seed))
    done = 0
    for first, end in ordered:
        for band in (slice(0, outs // 2), slice(outs // 2, outs)):
            if len(places[band]):
                part.put(rows[band], places[band], first, end, done)
        done += end - first
    expected = torch.cat([whole[:, first:end] for first, end in ordered], dim=1)
    assert torch.equal(values(part)[places], expected)


@DTYPES
@KINDS
@given(
    rows=st.integers(1, 13) | st.integers(14, 60),
    outs=st.integers(1, 150),
    ins=st.integers(1, 3),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(1, 1, 1, True, 0)
@example(13, 64, 2, True, 0)
@settings(max_examples=8, deadline=None)
def test_products_equal_the_reference(
    native_path: str, dtype: torch.dtype, kind: str, rows: int, outs: int, ins: int, bias: bool,
    seed: int,
) -> None:  # fmt: skip
    """Within float32's roundings of what each block and its minimum add."""
    generator = torch.Generator().manual_seed(seed)
    part = packed(kind, random_rows(kind, outs, ins * _SUPER, seed), ins * _SUPER)
    x = torch.randn(rows, ins * _SUPER, generator=generator).to(dtype)
    shift = torch.randn(outs, generator=generator).to(dtype) if bias else None
    weight = values(part)
    expected = reference.quantized_linear(x, weight, shift)
    rounded = reference.rounded_to_int8(x, 32).abs()
    # What is added is numbers of a block and a minimum, whose sum is the weights: as these are of
    # all of a block's range, neither is larger than three times the largest.
    largest = weight.double().abs().unflatten(1, (-1, 32)).amax(-1, keepdim=True)
    sizes = rounded @ (3 * largest).expand(-1, -1, 32).flatten(1).T
    if shift is not None:
        sizes += shift.abs()
    error = (2 * ins * _SUPER / 32 + 6) * roundoff(torch.float32) * sizes
    assert_within(product(QuantizedLinear([part], shift, dtype), x), expected, error)


@KINDS
def test_products_are_as_near_to_those_of_the_numbers_as_rounding_to_127ths_lets_them(
    native_path: str, kind: str
) -> None:
    rows = random_rows(kind, 50, 2 * _SUPER)
    part, weight = packed(kind, rows, 2 * _SUPER), dequantized(kind, rows).double()
    x = torch.randn(9, 2 * _SUPER)
    # Each number of x is at most half a 127th of its block's largest beside itself.
    step = x.double().abs().unflatten(1, (-1, 32)).amax(-1, keepdim=True) / 254
    error = step.expand(-1, -1, 32).flatten(1) @ weight.abs().T
    error += 2.0**-10 * (x.double().abs() @ weight.abs().T) + 0.01
    found = product(QuantizedLinear([part], None, torch.float32), x)
    assert_within(found, x.double() @ weight.T, error)


@DTYPES
@KINDS
def test_a_rows_product_does_not_depend_on_the_other_rows(
    native_path: str, dtype: torch.dtype, kind: str
) -> None:
    outs, ins = 161, 2 * _SUPER
    layer = QuantizedLinear(
        [packed(kind, random_rows(kind, outs, ins), ins)], torch.randn(outs), dtype
    )
    x = torch.randn(70, ins).to(dtype)
    whole = product(layer, x)
    for count in range(1, 70):
        assert torch.equal(product(layer, x[:count]), whole[:count]), count
    for seed in range(5):
        chosen = torch.randint(70, (37,), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(product(layer, x[chosen]), whole[chosen])


@DTYPES
def test_parts_of_several_kinds_give_their_own_outputs_of_a_row(
    native_path: str, dtype: torch.dtype
) -> None:
    kinds, outs = ("Q4_K", "Q6_K", "Q8_0"), (33, 7, 64)
    parts = [
        packed(kind, random_rows(kind, count, _SUPER), _SUPER)
        for kind, count in zip(kinds, outs, strict=True)
    ]
    bias, x = torch.randn(sum(outs)), torch.randn(15, _SUPER).to(dtype)
    alone = [
        product(QuantizedLinear([part], shift, dtype), x)
        for part, shift in zip(parts, bias.split(outs), strict=True)
    ]
    together = QuantizedLinear(parts, bias, dtype)
    assert torch.equal(product(together, x), torch.cat(alone, dim=1))


@DTYPES
@KINDS
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_bad_number_spoils_its_own_row_alone(
    native_path: str, dtype: torch.dtype, kind: str, bad: float
) -> None:
    layer = QuantizedLinear([packed(kind, random_rows(kind, 40, _SUPER), _SUPER)], None, dtype)
    x = torch.randn(11, _SUPER).to(dtype)
    spoiled, clean = x.clone(), product(layer, x)
    spoiled[4, 34] = bad
    found = product(layer, spoiled)
    assert not found[4].isfinite().any()
    found[4] = clean[4]
    assert torch.equal(found, clean)


@DTYPES
@KINDS
@pytest.mark.parametrize("scale", [0.0, 2.0**-130, 2.0**-60, 2.0**100])
def test_zeros_tiny_and_huge_numbers_have_the_products_of_the_reference(
    native_path: str, dtype: torch.dtype, kind: str, scale: float
) -> None:
    part = packed(kind, random_rows(kind, 21, _SUPER), _SUPER)
    x = (torch.randn(3, _SUPER) * scale).to(dtype)
    expected = reference.quantized_linear(x, values(part), None)
    found = product(QuantizedLinear([part], None, dtype), x)
    assert_within(found, expected, scale * 1e-4)


@DTYPES
@KINDS
def test_rows_of_a_packed_table_are_those_of_the_unpacked_one(
    native_path: str, dtype: torch.dtype, kind: str
) -> None:
    part = packed(kind, random_rows(kind, 50, _SUPER), _SUPER)
    ids = torch.tensor([7, 49, 0, 56, 6, 57, 31])
    out = room(len(ids), _SUPER, dtype=dtype)
    table = QuantizedLinear([part], None, dtype)
    found = table.embed(ids, 11.3, out, first=7, vocab=60)
    assert_guards_untouched(found)
    assert torch.equal(found, reference.embed(ids, values(part).to(dtype), 11.3, first=7))
    with pytest.raises(IndexError, match="token ids from 0 to 60, there are 60"):
        table.embed(torch.tensor([0, 60]), 1.0, out[:2], first=7, vocab=60)
