"""Native linear layers against torch's."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.kernels.linear import Linear
from kernels.bounds import assert_guards_untouched, assert_within, guarded, room, roundoff

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def native_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    layer = Linear(guarded(weight), None if bias is None else guarded(bias), x.dtype)
    out = room(len(x), len(weight), dtype=x.dtype)
    assert layer(guarded(x), out) is out
    assert_guards_untouched(out)
    return out


def assert_equals_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Within a float32 rounding of each of the products and of each of the sums' terms."""
    wide = (x.double(), weight.double(), None if bias is None else bias.double())
    sizes = F.linear(wide[0].abs(), wide[1].abs(), None if wide[2] is None else wide[2].abs())
    error = (x.shape[1] + 1) * roundoff(torch.float32) * sizes
    assert_within(native_linear(x, weight, bias), F.linear(*wide), error)


@DTYPES
@given(
    rows=st.integers(1, 13) | st.integers(14, 60),
    outs=st.integers(1, 200),
    ins=st.integers(1, 200),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(1, 1, 1, True, 0)
@example(13, 32, 64, True, 0)
@example(7, 33, 63, True, 0)
# More rows than are worked on together, more weights than one share.
@example(61, 150, 1031, False, 0)
@settings(max_examples=25, deadline=None)
def test_native_products_equal_torch(
    native_path: str, dtype: torch.dtype, rows: int, outs: int, ins: int, bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, ins, generator=generator).to(dtype)
    weight = torch.randn(outs, ins, generator=generator).to(dtype)
    shift = torch.randn(outs, generator=generator).to(dtype) if bias else None
    assert_equals_torch(x, weight, shift)


@DTYPES
@pytest.mark.parametrize("scale", [2.0**-140, 2.0**118])
def test_native_products_of_tiny_and_huge_numbers_equal_torch(
    native_path: str, dtype: torch.dtype, scale: float
) -> None:
    x = (torch.randn(5, 31) * scale).to(dtype)
    # Powers of two, so that products below the normal numbers are exact as well.
    weight = 2.0 ** torch.randint(0, 4, (19, 31)).to(dtype)
    assert_equals_torch(x, weight, None)


@DTYPES
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_bad_number_spoils_its_own_row_and_a_bad_weight_its_own_output_alone(
    native_path: str, dtype: torch.dtype, bad: float
) -> None:
    x, weight = torch.randn(11, 35).to(dtype), torch.randn(37, 35).to(dtype)
    clean = native_linear(x, weight, None)
    spoiled_x, spoiled_weight = x.clone(), weight.clone()
    spoiled_x[4, 34] = bad
    spoiled_weight[36, 34] = bad
    by_row, by_output = (
        native_linear(spoiled_x, weight, None),
        native_linear(x, spoiled_weight, None),
    )
    assert not by_row[4].isfinite().any()
    assert not by_output[:, 36].isfinite().any()
    by_row[4], by_output[:, 36] = clean[4], clean[:, 36]
    assert torch.equal(by_row, clean)
    assert torch.equal(by_output, clean)


@DTYPES
def test_what_a_product_leaves_behind_does_not_matter_to_the_next(
    native_path: str, dtype: torch.dtype
) -> None:
    # Few inputs and an odd number of them: rows are padded where the numbers of others were.
    x, weight = torch.randn(11, 35).to(dtype), torch.randn(37, 35).to(dtype)
    clean = native_linear(x, weight, None)
    native_linear(torch.full((40, 64), torch.nan, dtype=dtype), torch.ones(3, 64).to(dtype), None)
    assert torch.equal(native_linear(x, weight, None), clean)
