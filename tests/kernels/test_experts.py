"""Native routing and experts against their torch references, and against rows alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels import reference
from headrace.kernels.elementwise import activate_and_multiply, gated_add, rms_norm, scale
from headrace.kernels.experts import experts, route
from headrace.kernels.grouped_linear import GroupedLinear

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
CPU = torch.device("cpu")
ACTIVATIONS = ["silu", "gelu_tanh", "clamped_swiglu"]


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within what sums in another order, and roundings of the steps in between, come to."""
    absolute, relative = (2e-5, 2e-5) if found.dtype == torch.float32 else (0.06, 0.03)
    torch.testing.assert_close(found, expected, atol=absolute, rtol=relative)


def grouped(
    count: int, outs: int, ins: int, dtype: torch.dtype, seed: int, *, biased: bool = False
) -> tuple[GroupedLinear, torch.Tensor, torch.Tensor | None]:
    """The products laid out, their weights and their biases."""
    weights = (numbers(seed, count, outs, ins) / ins**0.5).to(dtype)
    biases = numbers(seed + 1, count, outs).to(dtype) if biased else None
    layer = GroupedLinear(count, outs, ins, dtype, CPU)
    for expert in range(count):
        layer.put(expert, weights[expert], None if biases is None else biases[expert])
    return layer, weights, biases


@DTYPES
@given(
    rows=st.integers(1, 40),
    count=st.integers(1, 70),
    normalized=st.booleans(),
    equal=st.booleans(),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_native_routes_equal_the_reference(
    native_path: str,
    dtype: torch.dtype,
    rows: int,
    count: int,
    normalized: bool,
    equal: bool,
    seed: int,
    data: st.DataObject,
) -> None:
    chosen = data.draw(st.integers(1, count))
    scores = 3 * numbers(seed, rows, count)
    if equal:
        scores = scores.round()
    scores = scores.to(dtype)
    expected = reference.route(scores, chosen, normalized)
    found = scores.clone()
    route(found, chosen, normalized)
    assert torch.equal(found != 0, expected != 0)
    assert ((found != 0).sum(1) == chosen).all()
    torch.testing.assert_close(
        found, expected, atol=1e-6, rtol=1e-2 if dtype != torch.float32 else 1e-5
    )


@DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "hidden", "inner"), [(1, 72, 50), (7, 33, 17), (90, 64, 96)])
def test_native_experts_equal_the_reference(
    native_path: str,
    dtype: torch.dtype,
    activation: str,
    biased: bool,
    rows: int,
    hidden: int,
    inner: int,
) -> None:
    count, chosen = 9, 3
    gate_up, up_weights, up_biases = grouped(count, 2 * inner, hidden, dtype, 1, biased=biased)
    down, down_weights, down_biases = grouped(count, hidden, inner, dtype, 3, biased=biased)
    x, weights = numbers(5, rows, hidden).to(dtype), 2 * numbers(6, rows, count).to(dtype)
    route(weights, chosen, True)

    def product(
        stored: torch.Tensor, biases: torch.Tensor | None, expert: int, x: torch.Tensor
    ) -> torch.Tensor:
        bias = None if biases is None else biases[expert].float()
        return torch.nn.functional.linear(x.float(), stored[expert].float(), bias).to(dtype)

    expected = reference.experts(
        x,
        weights,
        lambda expert, x: product(up_weights, up_biases, expert, x),
        lambda expert, x: product(down_weights, down_biases, expert, x),
        activation,
    )
    found = experts(x, weights, gate_up, down, activation, torch.empty_like(x))
    assert_close(found, expected)


@DTYPES
def test_a_rows_experts_do_not_depend_on_the_other_rows(
    native_path: str, dtype: torch.dtype
) -> None:
    gate_up, *_ = grouped(8, 100, 72, dtype, 1, biased=True)
    down, *_ = grouped(8, 72, 50, dtype, 3, biased=True)
    x, weights = numbers(5, 60, 72).to(dtype), numbers(6, 60, 8).to(dtype)
    route(weights, 2, True)
    whole = experts(x, weights, gate_up, down, "silu", torch.empty_like(x))
    for rows in ([0], [59], [3, 3, 40], list(range(0, 60, 2))):
        own = x[rows].contiguous()
        found = experts(own, weights[rows], gate_up, down, "silu", torch.empty_like(own))
        assert torch.equal(found, whole[rows])


@DTYPES
def test_experts_without_rows_are_not_read(native_path: str, dtype: torch.dtype) -> None:
    gate_up, *_ = grouped(4, 100, 72, dtype, 1)
    down, *_ = grouped(4, 72, 50, dtype, 3)
    for layer in (gate_up, down):
        for expert in (0, 3):
            layer.put(expert, torch.full((layer.out_features, layer.in_features), torch.nan), None)
    x, weights = numbers(5, 6, 72).to(dtype), torch.zeros(6, 4, dtype=dtype)
    weights[:, 1], weights[2, 2], weights[4, 1] = 0.5, 0.25, 0.0
    found = experts(x, weights, gate_up, down, "silu", torch.empty_like(x))
    assert found.isfinite().all()
    assert (found[4] == 0).all()


@DTYPES
@pytest.mark.parametrize("width", [1, 7, 64, 333])
def test_native_sums_scales_and_norms_of_mixtures_equal_the_reference(
    native_path: str, dtype: torch.dtype, width: int
) -> None:
    x, delta = numbers(1, 75, width).to(dtype), numbers(2, 75, width).to(dtype)
    gate, weight = numbers(3, 75, 1).to(dtype), numbers(4, width).to(dtype)
    expected = (x.float() + torch.sigmoid(gate.float()) * delta.float()).to(dtype)
    summed = x.clone()
    gated_add(summed, delta, gate)
    assert_close(summed, expected)
    scaled = x.clone()
    scale(scaled, 0.22)
    assert torch.equal(scaled, x * 0.22)
    normed = rms_norm(x, weight, 1e-5, torch.empty_like(x), rounds_once=True)
    torch.testing.assert_close(
        normed, reference.rms_norm(x, weight, 1e-5, True), atol=1e-5, rtol=1e-2
    )


@DTYPES
def test_gates_and_ups_beyond_7_are_clamped(native_path: str, dtype: torch.dtype) -> None:
    gates = torch.tensor([[-9.0, 6.5, 7.0, 7.5, 300.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    ups = torch.tensor([[2.0, -1.0, -7.5, 0.5, -300.0], [7.5, 300.0, -6.5, 0.0, 1.0]])
    x = torch.cat((gates, ups), dim=1).to(dtype)
    found = activate_and_multiply(x, "clamped_swiglu", x.new_empty(2, 5))
    gates, ups = gates.clamp(max=7), ups.clamp(-7, 7)
    expected = (gates * torch.sigmoid(1.702 * gates) * (ups + 1)).to(dtype)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-2)
