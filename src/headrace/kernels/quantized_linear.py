"""Matrix products with weights that stay as GGUF files quantize them, in other order."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.kernels import path
from headrace.kernels.quantized_form import BLOCK, FORMS, Form


@dataclass
class QuantizedPart:
    """A weight [outs, ins] of one kind, ins a multiple of 32, packed row by row with put().

    Exact for Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0. Of Q4_K, Q5_K and Q6_K each scale and minimum is a
    product of two numbers, which is rounded to float16.
    """

    kind: str
    outs: int
    ins: int
    form: Form = field(init=False)
    packed: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        assert self.ins % BLOCK == 0
        self.form = FORMS[self.kind]
        size = path.native.quantized_size(self.form.native, self.outs, self.ins)
        self.packed = torch.zeros(size, dtype=torch.uint8)

    def put(
        self,
        rows: np.ndarray,
        outs: torch.Tensor,
        first: int = 0,
        end: int | None = None,
        to: int = 0,
    ) -> None:
        """Pack rows as the file has them: uint8 [R, bytes of a row], row i as output outs[i].

        outs: int64 [R]. first, end: of a row the inputs that are taken, multiples of 32; end: None
        for `ins` from first on. to: which input the first of them becomes.
        """
        assert rows.flags.c_contiguous
        assert outs.is_contiguous()
        assert len(rows) == len(outs)
        least, most = torch.aminmax(outs)
        assert 0 <= int(least) <= int(most) < self.outs
        count = self.ins if end is None else end - first
        assert not any(number % BLOCK for number in (first, count, to))
        assert to + count <= self.ins
        path.native.pack_quantized(
            self.kind,
            rows.ctypes.data,
            len(rows),
            rows.shape[1],
            outs.data_ptr(),
            first // BLOCK,
            count // BLOCK,
            to // BLOCK,
            self.packed.data_ptr(),
            self.ins,
        )


class QuantizedLinear:
    """y = x W^T + b, W [out, in] in parts that share the inputs, and optional b [out].

    x is rounded to whole numbers from -127 to 127 times a scale, by blocks of 32. Each row's result
    is the same, bit for bit, whatever other rows there are. Only by native kernels, of float32 and
    bfloat16.
    """

    native = True

    def __init__(
        self, parts: Sequence[QuantizedPart], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        self.parts, self.dtype = tuple(parts), dtype
        self.out_features = sum(part.outs for part in parts)
        self.in_features = parts[0].ins
        assert all(part.ins == self.in_features for part in parts)
        self._bias = None if bias is None else bias.to(dtype)
        # As many as are used: panels are filled up to whole ones.
        self.nbytes = sum(
            part.outs * (part.ins // BLOCK) * part.form.block_bytes for part in parts
        ) + (0 if self._bias is None else self._bias.nbytes)

    def products(self) -> list[tuple[QuantizedPart, int, int]]:
        """Each part, its bias's address, 0 for none, and its first output."""
        found, first = [], 0
        for part in self.parts:
            bias = self._bias
            address = 0 if bias is None else bias.data_ptr() + first * bias.itemsize
            found.append((part, address, first))
            first += part.outs
        return found

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Fill and return out [T, out] from x [T, in], both of self.dtype and contiguous."""
        for part, bias, first in self.products():
            path.native.quantized(
                x.data_ptr(),
                part.packed.data_ptr(),
                bias,
                out.data_ptr() + first * out.itemsize,
                len(x),
                part.outs,
                part.ins,
                self.out_features,
                part.form.native,
                self.dtype == torch.bfloat16,
            )
        return out

    def embed(
        self, ids: torch.Tensor, scale: float, out: torch.Tensor, *, first: int, vocab: int
    ) -> torch.Tensor:
        """As elementwise.embed, of a table in one part; fills and returns out [T, in]."""
        (part,) = self.parts
        least, most = torch.aminmax(ids)
        if int(least) < 0 or int(most) >= vocab:
            raise IndexError(f"token ids from {int(least)} to {int(most)}, there are {vocab}")
        path.native.embed_quantized(
            part.packed.data_ptr(),
            ids.data_ptr(),
            out.data_ptr(),
            len(ids),
            part.ins,
            scale,
            first,
            part.outs,
            part.form.native,
            self.dtype == torch.bfloat16,
        )
        return out
