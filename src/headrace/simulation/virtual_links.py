"""Edges between stages in virtual time: gloo on a slow line, in one process, without any waiting.

Time passes only when the clock's events run. A transfer behaves as over gloo (group_link.py): sends
and receives of an edge are matched in order; a receiver's notice that it is ready takes the edge's
delay to reach the sender; then the bytes need their time on the line, one message after another,
and the delay once more. A send is complete when its message has left, a receive when it is there.

What a stage must not do with a link is an error here, not luck: see LinkMisuseError.
"""

import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import NoReturn

import torch

from headrace.pipeline.ledger import Channel
from headrace.pipeline.links import End, edges
from headrace.protocol.ranks import Ranks

Action = Callable[[], None]


class LinkMisuseError(Exception):
    """A stage broke the rules of links: a fault in Headrace, never the user's.

    It sent what is not contiguous or not what the other end expects, took an edge for its reverse,
    or received into a buffer before the last receive into it was waited for.
    """


@dataclass(eq=False, slots=True)
class Alarm:
    """Something to do at a moment, unless it is cancelled before."""

    at: float
    action: Action


class VirtualClock:
    """Runs events in the order of their moments, in seconds from 0.

    ties: orders events of the same moment; without it the one scheduled first comes first.
    """

    def __init__(self, ties: random.Random | None = None) -> None:
        self.now = 0.0
        self._ties = ties
        self._events: list[tuple[float, float, int, Action]] = []
        self._numbers = itertools.count()
        # Apart from the events: nearly all are cancelled, and they must not hide that nothing else
        # can happen any more.
        self._alarms: list[Alarm] = []

    @property
    def idle(self) -> bool:
        """Whether no event is to come; alarms do not count."""
        return not self._events

    def schedule(self, delay_s: float, action: Action) -> None:
        """Have something happen so much later."""
        self.schedule_at(self.now + delay_s, action)

    def schedule_at(self, moment: float, action: Action) -> None:
        """Have something happen at a moment that has not passed."""
        tie = 0.0 if self._ties is None else self._ties.random()
        heappush(self._events, (moment, tie, next(self._numbers), action))

    def set_alarm(self, delay_s: float, action: Action) -> Alarm:
        """Have something happen so much later, after that moment's events, unless cancelled."""
        alarm = Alarm(self.now + delay_s, action)
        self._alarms.append(alarm)
        return alarm

    def cancel(self, alarm: Alarm) -> None:
        """Call an alarm off, if it has not gone off."""
        if alarm in self._alarms:
            self._alarms.remove(alarm)

    def run_next(self, until: float = math.inf) -> bool:
        """Run the next event or alarm; False, at the moment `until`, if none comes by then."""
        at = self._events[0][0] if self._events else math.inf
        alarm = min(self._alarms, key=lambda a: a.at) if self._alarms else None
        if alarm is not None and alarm.at < at:
            if alarm.at <= until:
                self.now = alarm.at
                self._alarms.remove(alarm)
                alarm.action()
                return True
        elif self._events and at <= until:
            self.now, _, _, action = heappop(self._events)
            action()
            return True
        if until < math.inf:
            self.now = max(self.now, until)
        return False


class VirtualTransfer:
    """A Handle. It is over once it is complete or has failed.

    tensor: what is sent, or the buffer. at: when it is complete, infinite while that is not known.
    """

    __slots__ = ("_alarm", "_edge", "_failure", "_resume", "at", "end", "tensor")

    def __init__(self, edge: "_Edge", end: End, tensor: torch.Tensor) -> None:
        self.end, self.tensor, self.at = end, tensor, math.inf
        self._edge = edge
        self._failure: Callable[[], NoReturn] | None = None
        self._resume: Action | None = None
        self._alarm: Alarm | None = None

    @property
    def over(self) -> bool:
        """Whether wait() would return, or raise, at once."""
        return self.at <= self._edge.clock.now or self._failure is not None

    def wait(self, timeout_s: float) -> float:
        """As Handle says, in virtual time: runs the clock until it is over."""
        if not self.over:
            self.watch(timeout_s, lambda: None)
            while not self.over:
                self._edge.clock.run_next()
        self._edge.waited_for(self)
        if self._failure is not None:
            self._failure()
        return self.at

    def watch(self, timeout_s: float, resume: Action) -> None:
        """Call resume when it is over, which is so after timeout_s at the latest. Not if it is."""
        clock = self._edge.clock
        self._resume = resume
        self._alarm = clock.set_alarm(timeout_s, partial(self._edge.expire, self, timeout_s))
        if self.at < math.inf:
            clock.schedule_at(self.at, self._tell)

    def complete(self, at: float) -> None:
        """Say when it is complete: now or later."""
        self.at = at
        if self._resume is not None:
            self._edge.clock.schedule_at(at, self._tell)

    def fail(self, failure: Callable[[], NoReturn]) -> None:
        """Unless it is over, it never will be complete: `failure` raises the LinkError."""
        if not self.over:
            self._failure = failure
            self._tell()

    def _tell(self) -> None:
        if self._resume is not None:
            assert self._alarm is not None
            self._edge.clock.cancel(self._alarm)
            resume, self._resume = self._resume, None
            resume()


class _Edge:
    """A directed edge, both its ends and the line between them."""

    def __init__(
        self,
        clock: VirtualClock,
        channel: Channel,
        delay: Callable[[Channel], float],
        bytes_per_s: float | None,
    ) -> None:
        self.clock = clock
        self._channel = channel
        self._delay = delay
        self._bytes_per_s = bytes_per_s
        self._sends: deque[VirtualTransfer] = deque()
        self._receives: deque[tuple[VirtualTransfer, float]] = deque()
        self._on_their_way: deque[tuple[VirtualTransfer, VirtualTransfer]] = deque()
        # Receives not waited for, by their buffers' addresses.
        self._filling: dict[int, VirtualTransfer] = {}
        self._newest_notice_at = self._line_free_at = self._newest_arrival_at = 0.0
        self._broken: OSError | None = None

    def start(self, end: End, tensor: torch.Tensor) -> VirtualTransfer:
        """Start one end of a transfer."""
        if self._broken is not None:
            end.gone(self._broken)
        if not tensor.is_contiguous():
            raise LinkMisuseError(f"{end}: the tensor is not contiguous")
        transfer = VirtualTransfer(self, end, tensor)
        if end.incoming:
            address = tensor.data_ptr()
            if tensor.numel() and self._filling.setdefault(address, transfer) is not transfer:
                raise LinkMisuseError(
                    f"{end}: the buffer was used again before its last receive was waited for"
                )
            # A socket is ordered: no notice, and no message, overtakes the one before.
            notice_at = max(self.clock.now + self._delay(self._channel), self._newest_notice_at)
            self._newest_notice_at = notice_at
            self._receives.append((transfer, notice_at))
        else:
            self._sends.append(transfer)
        if self._sends and self._receives:
            self._match()
        return transfer

    def waited_for(self, transfer: VirtualTransfer) -> None:
        """The stage may use the transfer's tensor again."""
        if transfer.end.incoming:
            self._filling.pop(transfer.tensor.data_ptr(), None)
        elif any(send is transfer for send, _ in self._on_their_way):
            # The message has left but is not there: what left is what must arrive.
            transfer.tensor = transfer.tensor.clone()

    def expire(self, transfer: VirtualTransfer, timeout_s: float) -> None:
        """A wait's deadline: no link survives it."""
        transfer.fail(partial(transfer.end.late, timeout_s))
        self.cut(TimeoutError("a wait ran out of time"))

    def cut(self, reason: OSError) -> None:
        """Open transfers fail, and none can be started any more."""
        self._broken = reason
        pairs = itertools.chain.from_iterable(self._on_their_way)
        for transfer in [*pairs, *self._sends, *(receive for receive, _ in self._receives)]:
            transfer.fail(partial(transfer.end.gone, reason))
        self._on_their_way.clear()

    def _match(self) -> None:
        send, (receive, notice_at) = self._sends.popleft(), self._receives.popleft()
        sent, buffer = send.tensor, receive.tensor
        if sent.shape != buffer.shape or sent.dtype != buffer.dtype:
            raise LinkMisuseError(
                f"{send.end}: {sent.dtype} {list(sent.shape)} was sent where "
                f"{buffer.dtype} {list(buffer.shape)} is expected"
            )
        on_line = 0.0 if self._bytes_per_s is None else sent.nbytes / self._bytes_per_s
        self._line_free_at = max(self.clock.now, notice_at, self._line_free_at) + on_line
        arrival_at = max(self._line_free_at + self._delay(self._channel), self._newest_arrival_at)
        self._newest_arrival_at = arrival_at
        self._on_their_way.append((send, receive))
        send.complete(self._line_free_at)
        self.clock.schedule_at(arrival_at, self._arrive)

    def _arrive(self) -> None:
        if self._on_their_way:
            send, receive = self._on_their_way.popleft()
            receive.tensor.copy_(send.tensor)
            receive.complete(self.clock.now)


@dataclass(frozen=True)
class VirtualLink:
    """One stage's end of an edge; see Link."""

    edge: _Edge
    end: End

    def send(self, tensor: torch.Tensor) -> VirtualTransfer:
        """As Link says. LinkMisuseError if the receive that it meets is of another shape."""
        if self.end.incoming:
            raise LinkMisuseError(f"{self.end}: cannot send on an edge that comes in")
        return self.edge.start(self.end, tensor)

    def receive(self, buffer: torch.Tensor, watched: bool = True) -> VirtualTransfer:
        """As Link says, but every transfer is watched. LinkMisuseError for a buffer that is in use,
        or of another shape."""
        if not self.end.incoming:
            raise LinkMisuseError(f"{self.end}: cannot receive on an edge that goes out")
        return self.edge.start(self.end, buffer)


class VirtualNetwork:
    """All edges of a pipeline.

    delay: seconds that a message, or a notice, takes on its way over an edge, asked for each.
    bytes_per_s: how fast an edge's line is; None: it takes no time to put a message on it.
    """

    def __init__(
        self,
        clock: VirtualClock,
        ranks: Ranks,
        delay: Callable[[Channel], float] = lambda channel: 0.0,
        bytes_per_s: float | None = None,
    ) -> None:
        self._edges = {
            channel: _Edge(clock, channel, delay, bytes_per_s) for channel in edges(ranks)
        }
        self._ranks = ranks

    def links(self, rank: int) -> dict[Channel, VirtualLink]:
        """A rank's ends of its edges."""
        return {
            channel: VirtualLink(edge, End(channel, channel.target == rank, self._ranks))
            for channel, edge in self._edges.items()
            if rank in channel[1:]
        }

    def cut(self, channel: Channel) -> None:
        """The edge is lost, both its ranks live: its open transfers fail, and all started later."""
        self._edges[channel].cut(ConnectionResetError("the link was cut"))

    def kill(self, rank: int) -> None:
        """The rank is no more: its edges' open transfers fail, and all that are started later."""
        for channel, edge in self._edges.items():
            if rank in channel[1:]:
                edge.cut(ConnectionResetError(f"{self._ranks.name(rank)} is gone"))
