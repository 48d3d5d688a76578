"""The small operations between matrix products; tensors are contiguous. Where there is an out it is
filled and returned."""

import torch

from headrace.kernels import path, reference


def embed(
    ids: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    first: int = 0,
    vocab: int | None = None,
) -> torch.Tensor:
    """Rows [T, hidden] of the table, contiguous, for ids int64 [T], times scale.

    first: the id of the table's first row; vocab: how many ids there are, None if the table has all
    of them. Zeros for ids whose row is elsewhere. Raises IndexError for an id that there is not.
    """
    count = len(table) if vocab is None else vocab
    if table.device.type == "cpu":
        least, most = torch.aminmax(ids)
        if int(least) < 0 or int(most) >= count:
            raise IndexError(f"token ids from {int(least)} to {int(most)}, there are {count}")
    if not path.runs_native(table.device, table.dtype):
        return out.copy_(reference.embed(ids, table, scale, first))
    assert table.is_contiguous()
    path.native.embed(
        table.data_ptr(),
        ids.data_ptr(),
        out.data_ptr(),
        len(ids),
        table.shape[1],
        scale,
        first,
        len(table),
        table.dtype == torch.bfloat16,
    )
    return out


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
    *,
    rounds_once: bool = False,
) -> torch.Tensor:
    """Root-mean-square norm of x [T, hidden] by rows, times weight [hidden]; in float32.

    rounds_once: the quotient is not rounded to x's type before the weight multiplies it.
    """
    if not path.runs_native(x.device, x.dtype):
        return out.copy_(reference.rms_norm(x, weight, epsilon, rounds_once))
    return _rms_norm(x, None, weight, epsilon, out, rounds_once)


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
    *,
    rounds_once: bool = False,
) -> torch.Tensor:
    """Add delta to x in place, both [T, hidden]; then as rms_norm."""
    if not path.runs_native(x.device, x.dtype):
        return out.copy_(reference.rms_norm(x.add_(delta), weight, epsilon, rounds_once))
    return _rms_norm(x, delta, weight, epsilon, out, rounds_once)


def head_norm(heads: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """rms_norm of each of the heads [T, N, head_dim], in place. weight: [head_dim].

    The heads of a token lie together; between tokens there may be others.
    """
    if not path.runs_native(heads.device, heads.dtype):
        heads.copy_(reference.rms_norm(heads, weight, epsilon))
        return
    assert heads.stride()[1:] == (heads.shape[2], 1)
    path.native.head_norm(
        heads.data_ptr(),
        weight.data_ptr(),
        len(heads),
        heads.stride(0),
        heads.shape[1],
        heads.shape[2],
        epsilon,
        heads.dtype == torch.bfloat16,
    )


def activate_and_multiply(x: torch.Tensor, activation: str, out: torch.Tensor) -> torch.Tensor:
    """Activation of the first half of each row of x [T, 2 width] times the second half: [T, width].

    activation: as of the operation (protocol/program.py).
    """
    if not path.runs_native(x.device, x.dtype):
        return out.copy_(reference.activate_and_multiply(x, activation))
    path.native.gate(
        x.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        out.shape[1],
        activation,
        x.dtype == torch.bfloat16,
    )
    return out


def gated_add(x: torch.Tensor, delta: torch.Tensor, gate: torch.Tensor) -> None:
    """Add sigmoid(gate) * delta to x in place, both [T, width], gate [T, 1]; in float32."""
    if not path.runs_native(x.device, x.dtype):
        x.copy_(x.float() + torch.sigmoid(gate.float()) * delta.float())
        return
    path.native.gated_add(
        x.data_ptr(),
        delta.data_ptr(),
        gate.data_ptr(),
        x.shape[0],
        x.shape[1],
        x.dtype == torch.bfloat16,
    )


def scale(x: torch.Tensor, factor: float) -> None:
    """x becomes factor * x, in place."""
    if not path.runs_native(x.device, x.dtype):
        x.mul_(factor)
        return
    assert x.is_contiguous()
    path.native.scale(x.data_ptr(), x.numel(), factor, x.dtype == torch.bfloat16)


def soft_cap(x: torch.Tensor, cap: float) -> None:
    """x becomes cap * tanh(x / cap), in place."""
    if not path.runs_native(x.device, x.dtype):
        x.copy_(reference.soft_cap(x, cap))
        return
    assert x.is_contiguous()
    path.native.soft_cap(x.data_ptr(), x.numel(), cap, x.dtype == torch.bfloat16)


def _rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
    rounds_once: bool,
) -> torch.Tensor:
    path.native.rms_norm(
        x.data_ptr(),
        0 if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        epsilon,
        rounds_once,
        x.dtype == torch.bfloat16,
    )
    return out
