"""Sums over the shards of a stage, through memory that the processes of a host share."""

import ctypes
import mmap
from collections.abc import Callable, Sequence

import torch

from headrace.kernels import path
from headrace.protocol.ranks import dealt

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
        self._shard, self._count = 0, 1

    def join(self, descriptor: int, shard: int, count: int, *, spin_s: float, check: Check) -> None:
        """Meet the others in memory of memory_size() bytes, zeros when the first comes.

        descriptor: of the memory, closed by the caller. spin_s: seconds for which a core is kept
        while another shard is waited for.
        """
        self._memory = mmap.mmap(descriptor, memory_size(count))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._shard, self._count = shard, count
        self.native.join(address, shard, count, spin_s, check)

    def leave(self) -> None:
        """Nothing more comes until another join()."""
        self.native.leave()
        self._memory = None

    def own_part(self, number: int, within_s: float) -> tuple[torch.Tensor, bool] | None:
        """What this shard gave to the round of that number, uint8, if it has or does so within less
        than a second; and whether the first shard alone reads it.

        It stays until all others have had it. Rounds are counted from 0, modulo 2^32.
        """
        part = self.native.own_part(number, within_s)
        if part is None:
            return None
        size, for_first = part
        return self.room(self._shard, number, size), for_first

    def room(self, shard: int, number: int, size: int) -> torch.Tensor:
        """Where so many bytes of a shard's part of a round belong, uint8."""
        address = self.native.room(shard, number)
        return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)

    def has_come(self, shard: int, number: int) -> None:
        """A shard's part of a round, which another host sent, is in its room."""
        self.native.has_come(shard, number)

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
        self._gather(part, len(part), widths, out, on_all=False)

    def part_of(self, x: torch.Tensor) -> torch.Tensor:
        """This shard's of a contiguous x, flat: they are as even as whole elements make them."""
        first, end = dealt(x.numel(), self._shard, self._count)
        return x.view(-1)[first:end]

    def part_size(self, count: int) -> int:
        """Elements of this shard's part of so many."""
        first, end = dealt(count, self._shard, self._count)
        return end - first

    def gather_parts(self, part: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """out, contiguous, on each shard, of the part_of() it that each has."""
        bounds = [dealt(out.numel(), shard, self._count) for shard in range(self._count)]
        self._gather(part, 1, [end - first for first, end in bounds], out, on_all=True)
        return out

    def _gather(
        self, part: torch.Tensor, rows: int, widths: Sequence[int], out: torch.Tensor, on_all: bool
    ) -> None:
        assert part.is_contiguous()
        assert out.is_contiguous()
        self.native.gather(
            part.data_ptr(), out.data_ptr(), rows, list(widths), part.itemsize, on_all
        )


def memory_size(shards: int) -> int:
    """Bytes of the memory that so many shards share."""
    return int(path.native.Exchange.memory_size(shards))
