"""A mixture of experts; tensors are contiguous."""

import torch

from headrace.kernels import path, reference
from headrace.kernels.grouped_linear import GroupedLinear


def route(scores: torch.Tensor, chosen: int, normalized: bool) -> None:
    """Scores [T, experts] become the experts' weights, in place: of a row's `chosen` highest, of
    equal ones the first, their part of a softmax, and 0 of the others.

    The softmax is over the chosen alone (normalized), else over all, in float32.
    """
    if not path.runs_native(scores.device, scores.dtype):
        scores.copy_(reference.route(scores, chosen, normalized))
        return
    rows, count = scores.shape
    path.native.route(
        scores.data_ptr(), rows, count, chosen, normalized, scores.dtype == torch.bfloat16
    )


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    gate_up: GroupedLinear,
    down: GroupedLinear,
    activation: str,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fills and returns out [T, hidden]: sums of what experts make of x [T, hidden], down of
    activation(gate) * up, times weights [T, experts]. Experts without weight are not asked."""
    if not (gate_up.native and down.native):
        return out.copy_(reference.experts(x, weights, gate_up, down, activation))
    path.native.experts(
        x.data_ptr(),
        weights.data_ptr(),
        out.data_ptr(),
        *gate_up.addresses(),
        *down.addresses(),
        len(x),
        gate_up.count,
        x.shape[1],
        down.in_features,
        activation,
        x.dtype == torch.bfloat16,
    )
    return out
