"""Memory that two processes of one host share, where messages lie until they are copied out.

The sender makes it, without a name, and hands its descriptor over: nobody else can find it. When
there is no room for a message, a larger piece takes the place of the one before, which goes once
its messages are taken. So nobody waits for room, and there is never more than four times what was
under way at the most: the plans that stages hold ahead.
"""

import ctypes
import mmap
import os
from collections import deque

import torch

# Bytes: of the first piece, and where messages begin.
_FIRST = 1 << 20
_ALIGNMENT = 64


class Segment:
    """A piece of shared memory, of `size` bytes, as long as this object lives."""

    def __init__(self, descriptor: int) -> None:
        """Takes the descriptor over."""
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def write(self, tensor: torch.Tensor, offset: int) -> None:
        """Copy a contiguous tensor to this place."""
        ctypes.memmove(self._address + offset, tensor.data_ptr(), tensor.nbytes)

    def read(self, buffer: torch.Tensor, offset: int) -> None:
        """Fill a contiguous buffer from this place."""
        ctypes.memmove(buffer.data_ptr(), self._address + offset, buffer.nbytes)

    def __del__(self) -> None:
        os.close(self.descriptor)


def new_segment(size: int) -> Segment:
    """Memory that nobody has yet, but this process."""
    descriptor = os.memfd_create("headrace-messages")
    os.ftruncate(descriptor, size)
    return Segment(descriptor)


class MessageMemory:
    """The sender's account of where messages lie: taken in the order in which they were put."""

    def __init__(self) -> None:
        self.segment = new_segment(_FIRST)
        # Where each message begins that was not taken yet, oldest first, and the place behind the
        # newest. Of pieces before, only how many.
        self._offsets: deque[int] = deque()
        self._end = 0
        self._elsewhere = 0

    @property
    def count(self) -> int:
        """Messages not known to be taken."""
        return self._elsewhere + len(self._offsets)

    def put(self, tensor: torch.Tensor) -> int | None:
        """Copy a message in; where it begins, None if there is no room."""
        offset = self._room(tensor.nbytes)
        if offset is not None:
            self.segment.write(tensor, offset)
            self._offsets.append(offset)
            self._end = offset + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return offset

    def grow(self, size: int) -> None:
        """Begin a larger piece, with room for a message of this size at least."""
        least = max(2 * self.segment.size, 2 * size)
        self.segment = new_segment(1 << (least - 1).bit_length())
        self._elsewhere += len(self._offsets)
        self._offsets.clear()

    def taken(self, count: int) -> None:
        """So many more of the oldest messages are no longer needed."""
        elsewhere = min(count, self._elsewhere)
        self._elsewhere -= elsewhere
        for _ in range(count - elsewhere):
            self._offsets.popleft()

    def _room(self, size: int) -> int | None:
        if not self._offsets:
            return 0 if size <= self.segment.size else None
        oldest, end = self._offsets[0], self._end
        if end <= oldest:
            return end if end + size <= oldest else None
        if end + size <= self.segment.size:
            return end
        return 0 if size <= oldest else None
