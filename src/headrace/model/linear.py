"""Matrix products with weights laid out once, at load, for the device that runs them."""

import platform

import torch
import torch.nn.functional as F


class Linear:
    """y = x W^T + b for W [out, in] and optional b [out].

    On x86 CPUs W is packed for oneDNN. Where the CPU has no arithmetic for dtype (oneDNN then
    falls back to loops several times slower than float32), W keeps its rounded values but is held
    and multiplied in float32; inputs and outputs have dtype all the same.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        on_cpu = weight.device.type == "cpu"
        self._wide = on_cpu and not computes_natively(dtype)
        held = torch.float32 if self._wide else dtype
        weight = weight.to(dtype).to(held)
        self._bias = None if bias is None else bias.to(dtype).to(held)
        self._packed = on_cpu and _can_pack()
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight
        )
        self.nbytes = self.out_features * self.in_features * held.itemsize + (
            0 if self._bias is None else self._bias.nbytes
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] of self.dtype to [T, out] of self.dtype."""
        if self._wide:
            x = x.float()
        if self._packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
        else:
            y = F.linear(x, self._weight, self._bias)
        return y.to(self.dtype)


def computes_natively(dtype: torch.dtype) -> bool:
    """Whether this CPU's oneDNN multiplies matrices of dtype."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def _can_pack() -> bool:
    return bool(torch._C._has_mkldnn) and platform.machine() == "x86_64"
