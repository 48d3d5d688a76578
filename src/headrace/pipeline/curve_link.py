"""Edges between hosts: a ZeroMQ connection each, encrypted with CURVE, to one peer.

The receiving rank listens and the sending one connects, with keys that both derive from the run's
secret and the edge's name. Once the peer is there, nobody else is let in.

A message is cut in frames, which overlaps encrypting and decrypting it. They are copied when they
are sent, so a send is complete at once, whether or not anybody receives it. What is under way is
bounded by the plans that a stage holds. Frames that come wait with ZeroMQ until their receive is
posted. A thread for each incoming edge puts them where they belong, and notes when.

A connection that breaks is not made again: what was under way is lost, and the link is dead. How
long it lives on while nothing gets through is said in pipeline/curve.py.
"""

import contextlib
import io
import os
import queue
import select
import sys
import threading
import time
from dataclasses import dataclass, field

import torch
import zmq

from headrace.errors import StartError
from headrace.host.cluster_key import Secret
from headrace.pipeline.curve import FRAME_BYTES, Context, Gate, Socket, open_door, show_key
from headrace.pipeline.ledger import Handle
from headrace.pipeline.links import LOOK_S, Check, End, SlowLine

# Milliseconds for what was sent last to leave, when a link is closed in order.
_LINGER_MS = 5000


@dataclass(frozen=True)
class EdgeKey:
    """What both ends of an edge must have in common. run: the secret of one start of a pipeline."""

    run: Secret = field(repr=False)
    epoch: int
    encrypted: bool

    def name(self, end: End) -> str:
        """The edge's, in this epoch."""
        channel = end.channel
        return f"{channel.tensors} {channel.source} {channel.target} epoch {self.epoch}"


class CurveListener:
    """The receiving end, before its peer has come. address: where it may connect."""

    def __init__(self, context: Context, gate: Gate, end: End, key: EdgeKey, address: str) -> None:
        """address: of this host, as others reach it. Raises StartError if it cannot be had."""
        self._end = end
        self._door = open_door(address, 0, f"for {end.channel.tensors} from another host")
        self.address = self._door.address
        self._socket = context.socket(zmq.PAIR)
        gate.guard(self._socket, key.name(end), key.run, key.encrypted)
        self._door.hand_to(self._socket)

    def accept(
        self, timeout_s: float, line: SlowLine | None = None, check: Check = lambda: None
    ) -> "CurveLink":
        """The link, once the peer is there. Raises StartError naming both sides if it does not come
        in time, and what check raises."""
        what = "did not connect"
        try:
            _wait_for_peer(self._socket, self._end, self.address, what, timeout_s, check)
        except BaseException:
            self.close()
            raise
        self._door.shut()
        return CurveLink(self._end, self._socket, line)

    def close(self) -> None:
        """Without a peer."""
        self._door.shut()
        self._socket.close(0)


def connect_curve(
    context: Context,
    end: End,
    key: EdgeKey,
    address: str,
    timeout_s: float,
    check: Check = lambda: None,
) -> "CurveLink":
    """The sending end. Raises StartError naming both sides if the peer cannot be reached in time,
    or has another key, and what check raises."""
    connecting = context.socket(zmq.PAIR)
    show_key(connecting, key.name(end), key.run, key.encrypted)
    connecting.connect(address)
    try:
        _wait_for_peer(connecting, end, address, "did not let this one in", timeout_s, check)
    except BaseException:
        connecting.close(0)
        raise
    return CurveLink(end, connecting, None)


def _wait_for_peer(
    waiting: Socket, end: End, address: str, what: str, timeout_s: float, check: Check
) -> None:
    deadline = time.monotonic() + timeout_s
    while not waiting.poll(int(LOOK_S * 1000), zmq.POLLOUT):
        check()
        if time.monotonic() > deadline:
            raise StartError(
                f"{end.ranks.name(end.peer)} {what} at {address} within {timeout_s:g} s, for "
                f"{end.channel.tensors}: is a firewall between the hosts?"
            )


@dataclass(frozen=True)
class _Sent:
    """Copied when it was sent: nothing to wait for."""

    def wait(self, timeout_s: float) -> None:
        return None


@dataclass(eq=False)
class _Receive:
    """at: when it is complete; may be still to come. error: why it never will be."""

    link: "CurveLink"
    buffer: torch.Tensor
    posted_at: float
    at: float = 0.0
    error: Exception | None = None
    settled: threading.Event = field(default_factory=threading.Event)

    def fail(self, error: Exception) -> None:
        """It will never be complete."""
        self.error = error
        self.settled.set()

    def wait(self, timeout_s: float) -> float:
        deadline = time.monotonic() + timeout_s
        in_time = self.settled.wait(timeout_s)
        if in_time and self.error is not None:
            self.link.end.gone(self.error)
        if in_time:
            left_s = min(self.at, deadline) - time.monotonic()
            if left_s > 0:
                time.sleep(left_s)
            in_time = self.at <= deadline
        if not in_time:
            self.link.give_up()
            self.link.end.late(timeout_s)
        return self.at


class CurveLink:
    """An edge over a socket that has its peer. line: makes it slower than it is."""

    def __init__(self, end: End, paired: Socket, line: SlowLine | None) -> None:
        self.end = end
        self._socket, self._line = paired, line
        self._dead: Exception | None = None
        self._posted: queue.SimpleQueue[_Receive | None] = queue.SimpleQueue()
        # File objects: once closed, their numbers cannot be mistaken for other files'.
        self._wake = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")
        self._descriptor = int(paired.getsockopt(zmq.FD))
        if end.incoming:
            name = f"arrivals of {end.channel.tensors}"
            threading.Thread(target=self._take_arrivals, name=name, daemon=True).start()

    def send(self, tensor: torch.Tensor) -> Handle:
        """As Link says, on the sending end."""
        data = _bytes_of(tensor)
        try:
            if self._dead is not None or not _events(self._socket) & zmq.POLLOUT:
                raise ConnectionError("the peer is gone")
            for begin in range(0, max(1, len(data)), FRAME_BYTES):
                self._socket.send(data[begin : begin + FRAME_BYTES], zmq.NOBLOCK)
        except (zmq.ZMQError, ConnectionError) as error:
            self.give_up()
            self.end.gone(error)
        return _Sent()

    def receive(self, buffer: torch.Tensor, watched: bool = True) -> Handle:
        """As Link says, on the receiving end. Every receive is watched."""
        if self._dead is not None:
            self.end.gone(self._dead)
        receive = _Receive(self, buffer, time.monotonic())
        self._posted.put(receive)
        if self._dead is not None:
            # The thread may have looked for the last time before.
            self._fail_posted()
        return receive

    def give_up(self) -> None:
        """Declare the link dead: no transfer survives, and the peer learns of it."""
        self._end(linger_ms=0)

    def close(self) -> None:
        """Leave the edge, once everything was waited for: what was sent last still arrives."""
        self._end(linger_ms=_LINGER_MS)

    def _end(self, linger_ms: int) -> None:
        if self._dead is None:
            self._dead = ConnectionError("the link was given up")
            if self.end.incoming:
                # The socket is the thread's.
                self._wake.write((1).to_bytes(8, sys.byteorder))
                self._posted.put(None)
            else:
                self._socket.close(linger_ms)

    def _take_arrivals(self) -> None:
        waiting: _Receive | None = None
        try:
            while True:
                frame = self._frame()
                here_at = time.monotonic()
                waiting = self._next_posted()
                self._fill(waiting, frame, here_at)
        except Exception as error:
            # Whatever it is: nobody else could tell those that wait.
            self._dead = self._dead or error
            if waiting is not None and not waiting.settled.is_set():
                waiting.fail(self._dead)
            self._fail_posted()
        finally:
            self._socket.close(0)

    def _fail_posted(self) -> None:
        assert self._dead is not None
        with contextlib.suppress(queue.Empty):
            while True:
                if (receive := self._posted.get_nowait()) is not None:
                    receive.fail(self._dead)

    def _next_posted(self) -> _Receive:
        """The receive that comes next; ConnectionError if the link is given up meanwhile."""
        receive = self._posted.get()
        if receive is None:
            raise ConnectionError("the link was given up")
        return receive

    def _fill(self, receive: _Receive, frame: zmq.Frame, here_at: float) -> None:
        target, filled = _bytes_of(receive.buffer), 0
        while True:
            # ValueError for more than there is room for.
            target[filled : filled + len(frame)] = frame.buffer
            filled += len(frame)
            if filled == len(target):
                break
            frame, here_at = self._frame(), time.monotonic()
        receive.at = max(here_at, receive.posted_at)
        if self._line is not None:
            receive.at = self._line.arrival(receive.posted_at, here_at, len(target))
        receive.settled.set()

    def _frame(self) -> zmq.Frame:
        """The next that comes; ConnectionError if none can."""
        while True:
            with contextlib.suppress(zmq.Again):
                return self._socket.recv(zmq.NOBLOCK, copy=False)
            # Its descriptor tells of changes only, so it is asked before each wait.
            events = _events(self._socket)
            if not events & zmq.POLLIN:
                if not events & zmq.POLLOUT:
                    raise ConnectionError("the peer is gone")
                select.select([self._descriptor, self._wake.fileno()], [], [])
            self._check_alive()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead


def _events(of: Socket) -> int:
    """What it can do now. Without a peer, it cannot send."""
    return int(of.getsockopt(zmq.EVENTS))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Its own memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
