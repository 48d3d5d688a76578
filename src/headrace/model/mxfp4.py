"""Numbers of 4 bits that share a scale in blocks of 32, as bfloat16, which holds them exactly.

Source: OCP Microscaling Formats (MX) Specification 1.0: E2M1 elements, E8M0 scales.
"""

import torch

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_SIZES, *(-size for size in _SIZES)], dtype=torch.bfloat16)
_EXPONENT_BIAS = 127


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 [rows, 32 n] of uint8 blocks [rows, n, 16], whose byte j holds elements 2j, in its
    low half, and 2j + 1, and of uint8 scales [rows, n]."""
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1)
    values = _VALUES[halves.long()].flatten(2)
    exponents = scales.int() - _EXPONENT_BIAS
    return torch.ldexp(values, exponents[..., None]).to(torch.bfloat16).flatten(1)
