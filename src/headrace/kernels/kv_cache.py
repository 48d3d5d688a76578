"""One layer's keys and values, in blocks, laid out for the kernels."""

import math
from dataclasses import dataclass

import numpy as np
import torch

# The native kernels read so many positions at a time.
_POSITIONS_TOGETHER = 16
_CACHE_LINE = 64


@dataclass(frozen=True)
class KvCache:
    """B blocks of block_size positions.

    pair elements that the kernels take together lie side by side: 2 of bfloat16, else 1. In memory
    a block has block_rows positions, block_size rounded up.

    keys [B, kv_heads, head_dim / pair, block_rows, pair]: scores of neighbouring positions are
    computed together. values [B, kv_heads, block_rows / pair, head_dim, pair].
    """

    keys: torch.Tensor
    values: torch.Tensor
    block_size: int

    @property
    def block_rows(self) -> int:
        """Positions that a block takes in memory."""
        return self.keys.shape[3]

    @property
    def kv_heads(self) -> int:
        """Heads of keys and of values."""
        return self.keys.shape[1]

    @property
    def head_dim(self) -> int:
        """Elements of a key, and of a value."""
        return self.values.shape[3]


def new_cache(
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KvCache:
    """A cache of zeros, so that what nobody has written is at least a number."""
    pair, rows = _pair(dtype), _block_rows(block_size)
    sizes = num_blocks, kv_heads
    keys = _zeros((*sizes, head_dim // pair, rows, pair), dtype, device)
    values = _zeros((*sizes, rows // pair, head_dim, pair), dtype, device)
    return KvCache(keys, values, block_size)


def bytes_per_block(block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """What a block takes in one layer, keys and values."""
    return 2 * _block_rows(block_size) * kv_heads * head_dim * dtype.itemsize


def write(cache: KvCache, index: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Put keys and values [T, kv_heads, head_dim] at places [T], block * block_size + offset."""
    blocks, offsets = index // cache.block_size, index % cache.block_size
    pair = cache.keys.shape[4]
    shape = (len(index), cache.kv_heads, cache.head_dim // pair, pair)
    cache.keys[blocks, :, :, offsets] = key.reshape(shape)
    cache.values[blocks, :, offsets // pair, :, offsets % pair] = value


def read(cache: KvCache, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of whole blocks, in order: tables [..., N] to [..., N * block_size, kv_heads,
    head_dim] each."""
    keys = cache.keys[tables].movedim(-2, -4).flatten(-2)
    values = cache.values[tables].transpose(-1, -2).flatten(-3, -2).transpose(-2, -3)
    size = cache.block_size
    return keys[..., :size, :, :].flatten(-4, -3), values[..., :size, :, :].flatten(-4, -3)


def _pair(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.bfloat16 else 1


def _block_rows(block_size: int) -> int:
    return -(-block_size // _POSITIONS_TOGETHER) * _POSITIONS_TOGETHER


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On CPUs through numpy, whose zeros take no memory until they are written; torch's do.

    They begin where a cache line does, or half of all vectors would lie in two of them.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _CACHE_LINE, dtype=np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
