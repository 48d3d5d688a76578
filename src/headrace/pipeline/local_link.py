"""Edges between ranks of one host: bytes in shared memory, and a Unix socket that says where.

A send copies its message into shared memory, tells the receiver by a packet, and is complete. So
nobody's progress depends on what the other is doing: there are no threads, and nothing blocks. A
receive is a note of where a message is to go; its wait takes packets, in order, until its own has
come, and copies each message where its receive wants it. Before that, nothing touches the buffer.

A packet also says when its message lay there, on the clock that all processes of a host have in
common (CLOCK_MONOTONIC): a receive so knows the moment, however late it looks. Now and then the
receiver says how many messages it has taken, and their room is used again.

If the socket is full, by hundreds of messages that nobody has asked for, a thread waits for room.

A peer that dies closes its socket: that is noticed at once by whoever waits for it or sends to it.
What it sent before is still received. A link that is given up is shut down at both ends.
"""

import array
import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import torch

from headrace.pipeline.ledger import Handle
from headrace.pipeline.links import End, SlowLine, sleep_until
from headrace.pipeline.message_memory import MessageMemory, Segment

# Where a message begins, its bytes, and the moment at which it lay there.
_PACKET = struct.Struct("=QQd")
# How many more messages were taken.
_TAKEN = struct.Struct("=Q")
# The receiver says so after so many messages, or so much of the memory.
_TELL_EACH = 8
_TELL_SHARE = 4
# Seconds that a receiver has for what it was not told of when the sender leaves.
_LINGER_S = 5.0
_DESCRIPTOR_ROOM = socket.CMSG_SPACE(array.array("i", [0]).itemsize)
# poll() takes milliseconds as a C int.
_LONGEST_MS = 2**31 - 1


@dataclass(frozen=True)
class _Sent:
    """A message that was copied."""

    def wait(self, timeout_s: float) -> None:
        """At once."""


class _LocalLink:
    """error: why the link is dead, None as long as it is not."""

    def __init__(self, end: End, paired: socket.socket) -> None:
        """paired: a SOCK_SEQPACKET socket whose peer is the edge's other end."""
        paired.setblocking(False)
        self.end = end
        self.error: OSError | None = None
        self._socket = paired

    def give_up(self, error: OSError | None = None) -> None:
        """Declare the link dead, at both ends."""
        if self.error is None:
            self.error = error or TimeoutError("a wait ran out of time")
            # The peer may have gone before.
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Leave the edge. What was sent can still be received."""
        self.error = self.error or ConnectionAbortedError("this end was closed")
        self._socket.close()


class SendingLink(_LocalLink):
    """The end of an edge that sends."""

    _SENT: ClassVar = _Sent()

    def __init__(self, end: End, paired: socket.socket) -> None:
        super().__init__(end, paired)
        self._memory = MessageMemory()
        # What the receiver is still to be given a descriptor of.
        self._new: Segment | None = self._memory.segment
        # Packets that wait for room in the socket, and the thread that has an eye on it.
        self._held: deque[tuple[bytes, Segment | None]] = deque()
        self._holder: threading.Thread | None = None
        self._lock = threading.Lock()

    def send(self, tensor: torch.Tensor) -> Handle:
        """As Link says. The tensor may be used again at once."""
        if self.error is not None:
            self.end.gone(self.error)
        try:
            offset = self._place(tensor)
            packet = _PACKET.pack(offset, tensor.nbytes, time.monotonic())
            segment, self._new = self._new, None
            with self._lock:
                if self._held or not self._tell(packet, segment):
                    self._hold(packet, segment)
        except OSError as error:
            self.give_up(error)
            self.end.gone(error)
        return self._SENT

    def receive(self, buffer: torch.Tensor, watched: bool = True) -> Handle:
        """Not on this end."""
        raise AssertionError(f"{self.end}: nothing comes in on this edge")

    def close(self) -> None:
        """As above, once the receiver was told of every message, or does not ask for them."""
        if self._holder is not None:
            self._holder.join(_LINGER_S)
        super().close()

    def _place(self, tensor: torch.Tensor) -> int:
        if self._memory.count >= _TELL_EACH:
            self._note_taken()
        offset = self._memory.put(tensor)
        if offset is None:
            self._note_taken()
            offset = self._memory.put(tensor)
        if offset is None:
            self._memory.grow(tensor.nbytes)
            self._new = self._memory.segment
            offset = self._memory.put(tensor)
            assert offset is not None
        return offset

    def _note_taken(self) -> None:
        while True:
            try:
                said = self._socket.recv(_TAKEN.size)
            except BlockingIOError:
                return
            if not said:
                raise ConnectionResetError("the peer closed it")
            self._memory.taken(*_TAKEN.unpack(said))

    def _tell(self, packet: bytes, segment: Segment | None) -> bool:
        """Whether there was room."""
        try:
            if segment is None:
                self._socket.send(packet)
            else:
                socket.send_fds(self._socket, [packet], [segment.descriptor])
        except BlockingIOError:
            return False
        return True

    def _hold(self, packet: bytes, segment: Segment | None) -> None:
        self._held.append((packet, segment))
        if len(self._held) == 1:
            self._holder = threading.Thread(target=self._tell_held, daemon=True)
            self._holder.start()

    def _tell_held(self) -> None:
        """In a thread, until none is held."""
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        held = self._held
        while held:
            room.poll()
            with self._lock:
                try:
                    while held and self._tell(*held[0]):
                        held.popleft()
                except OSError as error:
                    self.give_up(error)
                    held.clear()


@dataclass(eq=False, slots=True)
class _Receive:
    """at: when it is complete, None while that is not known."""

    link: "ReceivingLink"
    buffer: torch.Tensor
    posted_at: float
    at: float | None = None

    def wait(self, timeout_s: float) -> float:
        """As Handle says."""
        return self.link.finish(self, timeout_s)


class ReceivingLink(_LocalLink):
    """The end of an edge that receives. line: makes it slower than it is."""

    def __init__(self, end: End, paired: socket.socket, line: SlowLine | None) -> None:
        super().__init__(end, paired)
        self._line = line
        self._posted: deque[_Receive] = deque()
        self._segment: Segment | None = None
        self._taken = self._taken_bytes = 0
        self._something = select.poll()
        self._something.register(self._socket, select.POLLIN)

    def send(self, tensor: torch.Tensor) -> Handle:
        """Not on this end."""
        raise AssertionError(f"{self.end}: nothing goes out on this edge")

    def receive(self, buffer: torch.Tensor, watched: bool = True) -> Handle:
        """As Link says. Every receive is watched: it costs nothing."""
        if self.error is not None:
            self.end.gone(self.error)
        receive = _Receive(self, buffer, time.monotonic())
        self._posted.append(receive)
        return receive

    def finish(self, receive: _Receive, timeout_s: float) -> float:
        """Wait for it. Returns the moment at which it was complete."""
        deadline = time.monotonic() + timeout_s
        try:
            while receive.at is None:
                if self.error is not None:
                    self.end.gone(self.error)
                self._take(deadline)
            if receive.at > deadline:
                sleep_until(deadline)
                raise TimeoutError
        except TimeoutError as error:
            self.give_up()
            self.end.late(timeout_s, error)
        except OSError as error:
            self.give_up(error)
            self.end.gone(error)
        if self._line is not None:
            sleep_until(receive.at)
        return receive.at

    def _take(self, deadline: float) -> None:
        """Take the next message, into the buffer of the oldest receive. TimeoutError if none comes,
        another OSError if none ever will."""
        try:
            packet, descriptors, _, _ = self._socket.recvmsg(_PACKET.size, _DESCRIPTOR_ROOM)
        except BlockingIOError:
            left_ms = (deadline - time.monotonic()) * 1e3
            # At least one, lest the last piece of a millisecond is waited for busily.
            if left_ms <= 0 or not self._something.poll(min(left_ms + 1, _LONGEST_MS)):
                raise TimeoutError from None
            return
        for _, _, numbers in descriptors:
            self._segment = Segment(*array.array("i", numbers))
        if not packet:
            raise ConnectionResetError("the peer closed it")
        offset, size, here_at = _PACKET.unpack(packet)
        receive = self._posted.popleft()
        if size != receive.buffer.nbytes:
            raise ConnectionError(f"{size} bytes came instead of {receive.buffer.nbytes}")
        assert self._segment is not None
        self._segment.read(receive.buffer, offset)
        receive.at = here_at
        if self._line is not None:
            receive.at = self._line.arrival(receive.posted_at, here_at, size)
        self._say_taken(size, self._segment.size)

    def _say_taken(self, size: int, of: int) -> None:
        self._taken += 1
        self._taken_bytes += size
        if self._taken >= _TELL_EACH or _TELL_SHARE * self._taken_bytes >= of:
            try:
                self._socket.send(_TAKEN.pack(self._taken))
            except OSError:
                # No room, or a peer that has sent its last: neither keeps a message from coming.
                return
            self._taken = self._taken_bytes = 0
