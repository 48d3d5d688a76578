"""Matrix products with weights laid out once, at load, for the device that runs them."""

import platform

import torch
import torch.nn.functional as F

from headrace.kernels import path

# oneDNN 3.7 multiplies so many rows of bfloat16 more slowly than a few more: 32 rows by SmolLM2's
# output projection took 7.0 ms on two cores with AMX, 33 rows 4.3 ms.
_SLOW_ROWS = range(17, 33)


class Linear:
    """y = x W^T + b for W [out, in] and optional b [out].

    The native kernel keeps W in its dtype: each row's result is the same, bit for bit, whatever
    other rows there are. Where the CPU has arithmetic for dtype that only oneDNN uses (float16, and
    bfloat16 where an older compiler built the kernels) W is packed for oneDNN. Without native
    kernels, W is held in float32 where the CPU has no arithmetic for dtype.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        on_cpu = weight.device.type == "cpu"
        own = path.is_chosen() or path.multiplies_natively(dtype) or not computes_natively(dtype)
        self.native = path.runs_native(weight.device, dtype) and own
        self._wide = on_cpu and not self.native and not computes_natively(dtype)
        held = torch.float32 if self._wide else dtype
        weight = weight.to(dtype).to(held)
        self._bias = None if bias is None else bias.to(dtype).to(held)
        self._packed = on_cpu and not self.native and _can_pack()
        if self.native:
            weight = pack(weight)
        elif self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._weight = weight
        self.nbytes = self.out_features * self.in_features * held.itemsize + (
            0 if self._bias is None else self._bias.nbytes
        )

    def addresses(self) -> tuple[int, int, int, int]:
        """Of the packed weight and of the bias, 0 for none; numbers of outputs and of inputs."""
        bias = 0 if self._bias is None else self._bias.data_ptr()
        return self._weight.data_ptr(), bias, self.out_features, self.in_features

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x [T, in] of self.dtype to [T, out] of self.dtype, both contiguous.

        Fills and returns out, or returns a new tensor where a library brings its own.
        """
        if self.native:
            packed, bias, outs, ins = self.addresses()
            path.native.linear(
                x.data_ptr(),
                packed,
                bias,
                out.data_ptr(),
                x.shape[0],
                outs,
                ins,
                self.dtype == torch.bfloat16,
            )
            return out
        if self._wide:
            x = x.float()
        if not self._packed:
            return F.linear(x, self._weight, self._bias).to(self.dtype)
        rows = len(x)
        if x.dtype == torch.bfloat16 and rows in _SLOW_ROWS:
            x = F.pad(x, (0, 0, 0, _SLOW_ROWS.stop - rows))
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return y[:rows].to(self.dtype)


def computes_natively(dtype: torch.dtype) -> bool:
    """Whether this CPU has products of dtype and oneDNN uses them."""
    if dtype != torch.float32 and not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        # oneDNN takes bfloat16 on any CPU with AVX-512, but then converts it to multiply.
        return bool(
            torch.ops.mkldnn._is_mkldnn_bf16_supported()
            and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
        )
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] of float32 or bfloat16 laid out for the native product, flat."""
    weight = weight.contiguous()
    sizes = (*weight.shape, weight.dtype == torch.bfloat16)
    packed = torch.empty(path.native.packed_size(*sizes), dtype=weight.dtype)
    path.native.pack(weight.data_ptr(), packed.data_ptr(), *sizes)
    return packed


def _can_pack() -> bool:
    return bool(torch._C._has_mkldnn) and platform.machine() == "x86_64"
