"""Matrix products with the weights of several experts, laid out once, at load."""

import torch
import torch.nn.functional as F

from headrace.kernels import path
from headrace.kernels.linear import computes_natively


class GroupedLinear:
    """y = x W^T + b with one W [out, in] and b [out] of `count`, put() in one after the other.

    The native kernel multiplies where it takes dtype at all: oneDNN would be called from Python,
    once for each expert. Elsewhere W is held in float32 where the CPU has no arithmetic for dtype.
    """

    def __init__(
        self, count: int, outs: int, ins: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.count, self.out_features, self.in_features = count, outs, ins
        self.dtype = dtype
        self.native = path.runs_native(device, dtype)
        shape: tuple[int, ...] = (count, outs, ins)
        self._held = dtype
        if self.native:
            shape = count, path.native.packed_size(outs, ins, dtype == torch.bfloat16)
        elif device.type == "cpu" and not computes_natively(dtype):
            self._held = torch.float32
        self._weights = torch.empty(shape, dtype=self._held, device=device)
        self._biases: torch.Tensor | None = None

    def put(self, expert: int, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """The weight [out, in] and the bias [out] of an expert; all of them have biases, or none
        has."""
        own = self._weights[expert]
        if bias is not None:
            if self._biases is None:
                shape = self.count, self.out_features
                self._biases = torch.empty(shape, dtype=self._held, device=own.device)
            self._biases[expert] = bias.to(self.dtype)
        if not self.native:
            own.copy_(weight.to(self.dtype))
            return
        weight = weight.to(self.dtype).contiguous()
        sizes = (*weight.shape, self.dtype == torch.bfloat16)
        path.native.pack(weight.data_ptr(), own.data_ptr(), *sizes)

    @property
    def nbytes(self) -> int:
        """Of all weights and biases."""
        return self._weights.nbytes + (0 if self._biases is None else self._biases.nbytes)

    def addresses(self) -> tuple[int, int]:
        """Of the first expert's packed weight, and of its bias, 0 for none; the others' follow."""
        biases = 0 if self._biases is None else self._biases.data_ptr()
        return self._weights.data_ptr(), biases

    def __call__(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] of self.dtype to [T, out]; only where the product is not native."""
        bias = None if self._biases is None else self._biases[expert]
        return F.linear(x.to(self._held), self._weights[expert], bias).to(self.dtype)
