"""Memory on CPUs for what steps read from end to end: weights and caches.

In huge pages, where Linux lends them: looking up an address then takes the CPU less time. In a
virtual machine, whose pages are looked up twice, two threads read 22 GB/s from usual pages and 32
from huge ones.
"""

import math
import mmap

import torch

_CACHE_LINE = 64
# What packed weights are taken from; those of a layer alone would hardly fill a huge page.
_CHUNK = 64 * 2**20


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros that takes no memory until it is written; it begins a page."""
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Arena:
    """Hands out pieces of large chunks, one after the other, each beginning with a cache line."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """So many elements, flat; what is in them is undefined."""
        size = count * dtype.itemsize
        if self._used + size > len(self._chunk):
            self._chunk = zeros((max(size, _CHUNK),), torch.uint8)
            self._used = 0
        piece = self._chunk[self._used : self._used + size]
        self._used += -(-size // _CACHE_LINE) * _CACHE_LINE
        return piece.view(dtype)
