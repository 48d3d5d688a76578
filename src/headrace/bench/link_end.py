"""One of the two processes between which `bench links` times messages.

It has links of every backend at once, one each way; those that are not at work sleep. Orders come
as lines of JSON on standard input, and each is answered by a line on standard output.
"""

import ctypes
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
import torch

from headrace.pipeline.group_link import Rendezvous
from headrace.pipeline.host_edges import HostEdges
from headrace.pipeline.ledger import Handle
from headrace.pipeline.links import Link
from headrace.pipeline.rendezvous import Meeting
from headrace.pipeline.store_socket import bind_master
from headrace.protocol.messages import EdgeAddress, HostLinks, LinkBackend
from headrace.protocol.ranks import Ranks

# Seconds for anything to come.
PATIENCE_S = 60.0
# Of messages sent one way, how many may be under way, and after how many the receiver says so: a
# stage, too, holds plans for a few steps ahead.
_UNDER_WAY, SAY_EACH = 8, 4
_LOOPBACK = "127.0.0.1"
# curve_insecure: not encrypted, as with --insecure-links.
Backend = Literal["local", "gloo", "curve", "curve_insecure"]


class SetUp(msgspec.Struct, tag=True):
    """Comes first; answered with what this process listens at. cpus: for the threads of links, none
    if they are not pinned. folder: for sockets. secret: the same at both ends, for keys."""

    rank: int
    cpus: list[int]
    backends: list[Backend]
    folder: str
    secret: bytes


class Listening(msgspec.Struct, tag=True):
    """Where a process is found, by backend; as an order, the other one. store_port: of the store of
    torch.distributed, on rank 0."""

    addresses: dict[Backend, list[EdgeAddress]]
    store_port: int = 0


class RoundTrips(msgspec.Struct, tag=True):
    """Send so many messages of `size` bytes there and back, one after the other."""

    backend: Backend
    size: int
    count: int


class OneWay(msgspec.Struct, tag=True):
    """Send so many messages of `size` bytes, a multiple of SAY_EACH, from rank 0 to rank 1."""

    backend: Backend
    size: int
    count: int


class Copies(msgspec.Struct, tag=True):
    """Copy `size` bytes so often from one place in memory to others."""

    size: int
    count: int


class Done(msgspec.Struct, tag=True):
    """seconds: of one round trip or copy, the median; of all messages one way. cpu_s: processor
    time of this process meanwhile, all its threads."""

    seconds: float = 0.0
    cpu_s: float = 0.0


Order = SetUp | Listening | RoundTrips | OneWay | Copies


@dataclass(frozen=True)
class _Ends:
    """This process's ends of a backend's two links. out: to the other process. back: from it."""

    out: Link
    back: Link


def _round_trips(ends: _Ends, first: bool, order: RoundTrips) -> float:
    message, buffer = _bytes(order.size), _bytes(order.size)
    seconds = []
    for _ in range(order.count):
        receive = ends.back.receive(buffer, watched=False)
        began = time.perf_counter()
        if first:
            sent = ends.out.send(message)
            receive.wait(PATIENCE_S)
        else:
            receive.wait(PATIENCE_S)
            sent = ends.out.send(message)
        seconds.append(time.perf_counter() - began)
        sent.wait(PATIENCE_S)
    return median(seconds)


def _send_all(ends: _Ends, order: OneWay) -> float:
    """Until the other has them all."""
    message, word = _bytes(order.size), _bytes(1)
    sent: list[Handle] = []
    began = time.perf_counter()
    for number in range(1, order.count + 1):
        sent.append(ends.out.send(message))
        if number % SAY_EACH == 0 and number >= _UNDER_WAY:
            ends.back.receive(word, watched=False).wait(PATIENCE_S)
    ends.back.receive(word, watched=False).wait(PATIENCE_S)
    seconds = time.perf_counter() - began
    for handle in sent:
        handle.wait(PATIENCE_S)
    return seconds


def _receive_all(ends: _Ends, order: OneWay) -> float:
    buffers, word = [_bytes(order.size) for _ in range(_UNDER_WAY)], _bytes(1)
    began = time.perf_counter()
    posted = [ends.back.receive(buffer, watched=False) for buffer in buffers[: order.count]]
    said: list[Handle] = []
    for number in range(order.count):
        posted[number].wait(PATIENCE_S)
        if len(posted) < order.count:
            posted.append(ends.back.receive(buffers[number % _UNDER_WAY], watched=False))
        if (number + 1) % SAY_EACH == 0:
            said.append(ends.out.send(word))
    for handle in said:
        handle.wait(PATIENCE_S)
    return time.perf_counter() - began


def _copies(order: Copies) -> float:
    source, *targets = (_bytes(order.size) for _ in range(1 + _UNDER_WAY))
    seconds = []
    for number in range(order.count):
        began = time.perf_counter()
        target = targets[number % _UNDER_WAY]
        ctypes.memmove(target.data_ptr(), source.data_ptr(), order.size)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _bytes(size: int) -> torch.Tensor:
    """uint8 [size]. Written to: memory is slow when it is touched for the first time."""
    return torch.full((size,), 7, dtype=torch.uint8)


def _meeting(backend: Backend, set_up: SetUp) -> Meeting:
    between = None
    if backend in ("curve", "curve_insecure"):
        # As if each process were on a host of its own.
        how = HostLinks([0, 1], _LOOPBACK, set_up.secret, encrypted=backend == "curve")
        between = HostEdges(how, epoch=0)
    kind: LinkBackend = "gloo" if backend == "gloo" else "local"
    return Meeting(set_up.rank, Ranks(2), kind, Path(set_up.folder), None, between)


def _hear() -> Order | None:
    """The next order, None if there is none to come."""
    line = sys.stdin.buffer.readline()
    return msgspec.json.decode(line, type=Order) if line else None


def _say(answer: Listening | Done) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def _connect(set_up: SetUp) -> dict[Backend, _Ends]:
    meetings = {backend: _meeting(backend, set_up) for backend in set_up.backends}
    listening = {backend: meeting.listening for backend, meeting in meetings.items()}
    with bind_master(_LOOPBACK, 0) as store:
        port = store.getsockname()[1]
        # The store closes what it is given.
        store_fd = os.dup(store.fileno()) if set_up.rank == 0 and "gloo" in meetings else None
        _say(Listening(listening, port))
        others = _hear()
        assert isinstance(others, Listening)
        rendezvous = Rendezvous(
            _LOOPBACK, port if set_up.rank == 0 else others.store_port, store_fd
        )
        ends: dict[Backend, _Ends] = {}
        for backend, meeting in meetings.items():
            peers = others.addresses[backend]
            device = torch.device("cpu")
            links = meeting.connect(peers, rendezvous, device, PATIENCE_S, lambda: None)
            out, back = sorted(links, key=lambda edge: edge.target == set_up.rank)
            ends[backend] = _Ends(links[out], links[back])
    return ends


def main() -> None:
    """Obey until there are no more orders."""
    set_up = _hear()
    assert isinstance(set_up, SetUp)
    if set_up.cpus:
        # OpenMP, which came with torch, has pinned this thread to one core, and would thereby
        # confine those of links to it.
        os.sched_setaffinity(0, set_up.cpus)
    ends = _connect(set_up)
    _say(Done())
    while (order := _hear()) is not None:
        cpu_before = time.process_time()
        match order:
            case RoundTrips():
                seconds = _round_trips(ends[order.backend], set_up.rank == 0, order)
            case OneWay():
                run = _send_all if set_up.rank == 0 else _receive_all
                seconds = run(ends[order.backend], order)
            case Copies():
                seconds = _copies(order)
        _say(Done(seconds, time.process_time() - cpu_before))
    # Threads of links may hold the interpreter's exit back.
    os._exit(0)


if __name__ == "__main__":
    main()
