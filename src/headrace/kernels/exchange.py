"""Sums over the shards of a stage, through memory that their processes share."""

import ctypes
import mmap
from collections.abc import Callable, Sequence

import torch

from headrace.kernels import path

# Called now and then while a shard is waited for, with its number and for how many seconds; may
# raise, which ends the wait.
Check = Callable[[int, float], None]
# What is added up as it is; other types are widened.
_TYPES = (torch.float32, torch.bfloat16)


class Exchange:
    """A shard's end. All shards of a stage make the same calls in the same order.

    native: what native programs call. Raises StartError if there are no native kernels.
    """

    def __init__(self) -> None:
        self.native = path.native.Exchange()
        self._memory: mmap.mmap | None = None

    def join(self, descriptor: int, shard: int, count: int, *, spin_s: float, check: Check) -> None:
        """Meet the others in memory of memory_size() bytes, zeros when the first comes.

        descriptor: of the memory, closed by the caller. spin_s: seconds for which a core is kept
        while another shard is waited for.
        """
        self._memory = mmap.mmap(descriptor, memory_size(count))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.native.join(address, shard, count, spin_s, check)

    def leave(self) -> None:
        """Nothing more comes until another join()."""
        self.native.leave()
        self._memory = None

    def all_reduce(self, x: torch.Tensor) -> None:
        """x, contiguous, becomes the sum of all shards' x."""
        if x.dtype not in _TYPES:
            wide = x.float()
            self.all_reduce(wide)
            x.copy_(wide)
            return
        assert x.is_contiguous()
        self.native.all_reduce(x.data_ptr(), x.numel(), x.dtype == torch.bfloat16)

    def gather(self, part: torch.Tensor, widths: Sequence[int], out: torch.Tensor) -> None:
        """On the first shard, out [rows, sum of widths] is all shards' parts [rows, width]; all
        contiguous."""
        if part.dtype not in _TYPES:
            wide = torch.empty_like(out, dtype=torch.float32)
            self.gather(part.float(), widths, wide)
            out.copy_(wide)
            return
        assert part.is_contiguous()
        assert out.is_contiguous()
        sizes = len(part), list(widths), part.dtype == torch.bfloat16
        self.native.gather(part.data_ptr(), out.data_ptr(), *sizes)


def memory_size(shards: int) -> int:
    """Bytes of the memory that so many shards share."""
    return int(path.native.Exchange.memory_size(shards))
