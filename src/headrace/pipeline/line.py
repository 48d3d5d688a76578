"""The line from one host to another, measured before anything runs on them.

The host at its end listens and answers, the one at its beginning connects and measures, over a
socket of the kind that edges between hosts have (pipeline/curve_link.py), whose firewalls it passes
where an edge would. What the figures contain besides the network, encrypting for one, a message of
a step takes as well.

First come small messages, each answered: half of the shortest round trip is the latency, since what
disturbs only lengthens. Then comes bulk, more and more of it, until it takes long enough to tell
the rate. So a fast line is measured in a fraction of a second, and a slow one is not flooded.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import zmq

from headrace.errors import StartError
from headrace.host.cluster_key import Secret
from headrace.pipeline.curve import FRAME_BYTES, Context, Gate, Socket, open_door, show_key
from headrace.protocol.cluster import (
    AnswerLine,
    LineFailed,
    LineMeasured,
    LineOpen,
    MeasureLine,
    ToldOfLine,
)
from headrace.protocol.hosts import LinkFigures
from headrace.signals import put_off

# Seconds for the other host to connect, or to let this one in; and then to measure, after which
# what has got through so far has to do.
CONNECT_S = 10.0
MEASURE_S = 10.0
# Bytes of a small message, about those of a step's sampled tokens; how many there are, unless they
# take longer than so many seconds, and at least.
_SMALL_BYTES = 256
_ROUND_TRIPS, _ROUND_TRIPS_S, _LEAST_ROUND_TRIPS = 50, 0.3, 3
# Bytes of bulk: the first, by how much the next is larger, and the most.
_FIRST_BULK, _GROWTH, _MOST_BULK = 1 << 14, 4, 1 << 25
# Bulk tells the rate if it takes so many seconds, and so many round trips: before, TCP has not
# found out what the line carries.
_LONG_S, _LONG_ROUND_TRIPS = 0.1, 4
# Seconds between two looks whether the other side is still there.
_LOOK_S = 0.2
# The first byte of a message: whether it is to be answered, or is the last.
_PASS, _ANSWER, _END = b"\0", b"\1", b"\2"


def take_part(
    order: AnswerLine | MeasureLine, address: str, interface: str
) -> Iterator[ToldOfLine]:
    """What a host does for an order, and what it says meanwhile. Takes CONNECT_S and MEASURE_S at
    most, and a moment.

    address: of this host, as others reach it. interface: in words, that which has it.
    """
    # One thread each to encrypt and to decrypt, as edges have.
    context = zmq.Context(io_threads=2)
    try:
        if isinstance(order, AnswerLine):
            yield from _answer(context, order, address, interface)
        else:
            yield _measure(context, order, interface)
    finally:
        context.term()


def _answer(
    context: Context, order: AnswerLine, address: str, interface: str
) -> Iterator[ToldOfLine]:
    gate = Gate(context)
    try:
        door = open_door(address, 0, "for a line from another host to be measured")
    except StartError as error:
        yield LineFailed(str(error))
        return
    try:
        with _line(context, linger_s=0.0) as line:
            gate.guard(line, order.name, Secret(order.secret), order.encrypted)
            door.hand_to(line)
            yield LineOpen(door.address, interface)
            if line.poll(_ms(CONNECT_S), zmq.POLLOUT):
                door.shut()
                _answer_all(line, time.monotonic() + MEASURE_S + _LOOK_S)
    finally:
        door.shut()


def _answer_all(line: Socket, deadline: float) -> None:
    """Until the last message, or the other side is gone."""
    while time.monotonic() < deadline:
        if line.poll(_ms(_LOOK_S)):
            kind = line.recv()[:1]
            if kind == _ANSWER:
                line.send(b"")
            elif kind == _END:
                return
        elif not line.poll(0, zmq.POLLOUT):
            return


def _measure(context: Context, order: MeasureLine, interface: str) -> LineMeasured | LineFailed:
    with _line(context, linger_s=_LOOK_S) as line:
        show_key(line, order.name, Secret(order.secret), order.encrypted)
        line.connect(order.address)
        if not line.poll(_ms(CONNECT_S), zmq.POLLOUT):
            return LineFailed(
                f"could not connect to {order.address} from {interface} within {CONNECT_S:g} s"
            )
        deadline = time.monotonic() + MEASURE_S
        figures = figures_by(lambda size: _round_trip(line, size, deadline))
        if figures is None:
            return LineFailed(
                f"connected to {order.address} from {interface}, but had no answer within "
                f"{MEASURE_S:g} s"
            )
        line.send(_END)
        return LineMeasured(figures)


@contextmanager
def _line(context: Context, linger_s: float) -> Iterator[Socket]:
    """A socket that is closed whatever interrupts: the context waits for it. linger_s: seconds for
    what was sent last."""
    with ExitStack() as undo:
        with put_off():
            line = context.socket(zmq.PAIR)
            undo.callback(line.close, _ms(linger_s))
        yield line


def figures_by(round_trip: Callable[[int], tuple[float, bool]]) -> LinkFigures | None:
    """What a line can do; None if not even a small message is answered.

    round_trip: seconds until so many bytes were answered, or until there was no more time for that;
    whether they were.
    """
    trips: list[float] = []
    # The first is a warm-up.
    while len(trips) <= _ROUND_TRIPS and (
        len(trips) <= _LEAST_ROUND_TRIPS or sum(trips) < _ROUND_TRIPS_S
    ):
        trip_s, answered = round_trip(_SMALL_BYTES)
        if not answered:
            break
        trips.append(trip_s)
    if not trips:
        return None
    shortest_s = min(trips[1:], default=trips[0])
    long_s, size = max(_LONG_S, _LONG_ROUND_TRIPS * shortest_s), _FIRST_BULK
    while True:
        taken_s, answered = round_trip(size)
        # What is cut short counts as if it had just got through.
        sending_s = max(taken_s - shortest_s, 1e-6)
        if not answered or sending_s > long_s or size >= _MOST_BULK:
            return LinkFigures(shortest_s / 2, size / sending_s)
        size *= _GROWTH


def _round_trip(line: Socket, size: int, deadline: float) -> tuple[float, bool]:
    """Seconds until so many bytes were answered, or until the deadline; whether they were."""
    began = time.monotonic()
    for left in range(size, 0, -FRAME_BYTES):
        kind = _ANSWER if left <= FRAME_BYTES else _PASS
        line.send(kind.ljust(min(left, FRAME_BYTES), b"\0"))
    answered = bool(line.poll(_ms(max(0.0, deadline - time.monotonic()))))
    if answered:
        line.recv()
    return time.monotonic() - began, answered


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
