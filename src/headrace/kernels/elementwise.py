"""The small operations between matrix products."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, computed in float32 (arXiv 1910.07467)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (arXiv 2104.09864), halves paired as Hugging Face stores them.

    x: [T, heads, head_dim]; cos, sin: [T, head_dim / 2]. Returns the same shape as x.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_and_multiply(x: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of the last dimension times the second half."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
