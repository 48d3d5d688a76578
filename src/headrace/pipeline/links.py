"""Edges between stages over torch.distributed, and what waiting means on each backend.

Every directed edge is a process group of its own, so that nothing queues behind anything else.
Starting a send or a receive returns at once. A buffer must live, untouched, from the start of its
transfer until its wait returns: the ledger holds it so long. A wait that runs out of time, or whose
peer is gone, is a LinkError; a link never survives one, and the pipeline ends.

gloo (CPU): bytes move on gloo's threads once both sides have started. Each incoming edge has a
thread that waits for one receive after the other, in which gloo blocks without computing, and so
notes when each was complete, however late the stage looks; the stage's own wait() blocks its thread
until then. A send's wait() blocks the host thread in gloo.

NCCL, XCCL (CUDA, XPU): transfers run on streams of their own. wait() blocks the host thread until
the transfer's event has come, because a device cannot be told to give up at a deadline, and orders
the current stream after it; on expiry the group is aborted. The buffer may then be used on the
current stream. Every edge carries a message at the start, in the order of edges(), since the first
one on a communicator blocks until the peer has come.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from headrace.errors import StartError
from headrace.pipeline.ledger import Channel, Handle, Tensors
from headrace.protocol.messages import LinkEmulation

# torch.distributed's name of the backend for each kind of device.
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}

# For torch.distributed's own deadlines, where ours are kept elsewhere.
_FOREVER = timedelta(days=365)
_POLL_S = 20e-6


class LinkError(Exception):
    """A transfer failed: the peer is gone, or did not do its part in time."""

    def __init__(self, message: str, peer: int) -> None:
        super().__init__(message)
        self.peer = peer


class Link(Protocol):
    """One stage's end of a directed edge."""

    def send(self, tensor: torch.Tensor) -> Handle:
        """Start sending a contiguous tensor; LinkError if the peer is known to be gone."""

    def receive(self, buffer: torch.Tensor) -> Handle:
        """Start receiving into a contiguous buffer of the sender's shape and dtype.

        LinkError if the peer is known to be gone.
        """


@dataclass(frozen=True)
class _End:
    """What a stage calls its end of an edge, in errors."""

    channel: Channel
    incoming: bool

    @property
    def peer(self) -> int:
        return self.channel.source if self.incoming else self.channel.target

    def gone(self, error: BaseException) -> NoReturn:
        raise LinkError(f"{self}: the link is gone", self.peer) from error

    def late(self, timeout_s: float, error: BaseException | None = None) -> NoReturn:
        raise LinkError(
            f"{self}: nothing came within {timeout_s:g} s (if a step may take that long, raise "
            "--stall-timeout)",
            self.peer,
        ) from error

    def __str__(self) -> str:
        doing = "waiting for" if self.incoming else "sending"
        towards = "from" if self.incoming else "to"
        return f"{doing} {self.channel.tensors} {towards} stage {self.peer}"


def _start(
    end: _End,
    operation: Callable[..., dist.Work | None],
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
) -> dist.Work:
    try:
        work = operation(tensor, end.peer, group=group)
    except RuntimeError as error:
        end.gone(error)
    assert work is not None, "this rank is not part of the edge"
    return work


# gloo


@dataclass(frozen=True)
class _GlooSend:
    work: dist.Work
    end: _End

    def wait(self, timeout_s: float) -> float:
        try:
            self.work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if "imed out" in str(error):
                self.end.late(timeout_s, error)
            self.end.gone(error)
        return time.monotonic()


@dataclass(eq=False)
class _GlooReceive:
    """A receive that the edge's thread waits for. started_at: when the stage posted it."""

    end: _End
    buffer: torch.Tensor
    started_at: float
    work: dist.Work | None = None
    at: float = 0.0
    error: RuntimeError | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout_s: float) -> float:
        if not self._done.wait(timeout_s):
            self.end.late(timeout_s)
        if self.error is not None:
            self.end.gone(self.error)
        return self.at

    def complete(self, at: float, error: RuntimeError | None = None) -> None:
        self.at, self.error = at, error
        self._done.set()


def _thread(name: str, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


class GlooLink:
    """An edge over gloo, as fast as it is."""

    def __init__(self, end: _End, group: dist.ProcessGroup) -> None:
        self._end, self._group = end, group
        self._posted: queue.SimpleQueue[_GlooReceive] = queue.SimpleQueue()
        if end.incoming:
            _thread(f"arrivals of {end.channel.tensors}", self._wait_for_arrivals)

    def send(self, tensor: torch.Tensor) -> Handle:
        return _GlooSend(_start(self._end, dist.isend, tensor, self._group), self._end)

    def receive(self, buffer: torch.Tensor) -> Handle:
        receive = _GlooReceive(self._end, buffer, time.monotonic())
        self._post(receive)
        return receive

    def _post(self, receive: _GlooReceive) -> None:
        receive.work = _start(self._end, dist.irecv, receive.buffer, self._group)
        self._posted.put(receive)

    def _wait_for_arrivals(self) -> None:
        while True:
            receive = self._posted.get()
            assert receive.work is not None
            try:
                receive.work.wait(_FOREVER)
            except RuntimeError as error:
                receive.complete(time.monotonic(), error)
            else:
                self._arrived(receive, time.monotonic())

    def _arrived(self, receive: _GlooReceive, at: float) -> None:
        receive.complete(at)


class EmulatedGlooLink(GlooLink):
    """An edge over gloo that behaves as a slower one would.

    The notice that a receiver is ready takes the latency to reach the sender, so the receive is
    posted that much later; then its bytes need their time on the line, one message after the other,
    and the latency once more. All of it is spent asleep, on the receiver's side.
    """

    def __init__(self, end: _End, group: dist.ProcessGroup, emulation: LinkEmulation) -> None:
        self._emulation = emulation
        self._line_free_at = 0.0
        self._notices: queue.SimpleQueue[_GlooReceive] = queue.SimpleQueue()
        super().__init__(end, group)
        if end.incoming:
            _thread(f"notices of {end.channel.tensors}", self._deliver_notices)

    def receive(self, buffer: torch.Tensor) -> Handle:
        receive = _GlooReceive(self._end, buffer, time.monotonic())
        self._notices.put(receive)
        return receive

    def _deliver_notices(self) -> None:
        while True:
            receive = self._notices.get()
            _sleep_until(receive.started_at + self._emulation.latency_s)
            try:
                self._post(receive)
            except LinkError as error:
                receive.complete(time.monotonic(), RuntimeError(str(error)))

    def _arrived(self, receive: _GlooReceive, at: float) -> None:
        on_line = 0.0
        if self._emulation.bytes_per_s is not None:
            on_line = receive.buffer.nbytes / self._emulation.bytes_per_s
        self._line_free_at = max(at, self._line_free_at) + on_line
        at = self._line_free_at + self._emulation.latency_s
        _sleep_until(at)
        receive.complete(at)


def _sleep_until(moment: float) -> None:
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)


# NCCL and XCCL


@dataclass(frozen=True)
class _DeviceHandle:
    work: dist.Work
    end: _End
    group: dist.ProcessGroup

    def wait(self, timeout_s: float) -> float:
        deadline = time.monotonic() + timeout_s
        try:
            while not self.work.is_completed():
                if time.monotonic() > deadline:
                    self._abort()
                    self.end.late(timeout_s)
                time.sleep(_POLL_S)
            self.work.wait()
        except RuntimeError as error:
            self.end.gone(error)
        return time.monotonic()

    def _abort(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.group._get_backend(torch.device(_device_of(self.group))).abort()


def _device_of(group: dist.ProcessGroup) -> str:
    backend = dist.get_backend(group)
    return next(device for device, name in BACKENDS.items() if name == backend)


@dataclass(frozen=True)
class DeviceLink:
    """An edge over NCCL or XCCL, between devices."""

    end: _End
    group: dist.ProcessGroup

    def send(self, tensor: torch.Tensor) -> Handle:
        return _DeviceHandle(_start(self.end, dist.isend, tensor, self.group), self.end, self.group)

    def receive(self, buffer: torch.Tensor) -> Handle:
        return _DeviceHandle(_start(self.end, dist.irecv, buffer, self.group), self.end, self.group)


# Setting up


def edges(num_stages: int) -> list[Channel]:
    """All directed edges of the pipeline, in the one order in which every rank sets them up."""
    if num_stages == 1:
        return []
    neighbours = [Channel(Tensors.ACTIVATIONS, s, s + 1) for s in range(num_stages - 1)]
    return [*neighbours, Channel(Tensors.FEEDBACK, num_stages - 1, 0)]


@dataclass(frozen=True)
class Rendezvous:
    """Where the stages meet. store_fd: the store's listening socket, on the first stage only.

    The socket is bound before (a TCPStore that binds its own listens on all interfaces).
    """

    address: str
    port: int
    store_fd: int | None


def connect(
    rendezvous: Rendezvous,
    stage: int,
    num_stages: int,
    device: torch.device,
    timeout_s: float,
    emulation: LinkEmulation | None = None,
) -> dict[Channel, Link]:
    """Join the other stages and set up this stage's ends of all its edges.

    emulation: make gloo's edges slower than they are. Raises StartError naming the address if the
    others do not come within timeout_s.
    """
    if num_stages == 1:
        return {}
    timeout = timedelta(seconds=timeout_s)
    backend = BACKENDS[device.type]
    try:
        store = TCPStore(
            rendezvous.address,
            rendezvous.port,
            world_size=num_stages,
            is_master=rendezvous.store_fd is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=rendezvous.store_fd,
        )
        dist.init_process_group(
            backend, store=store, rank=stage, world_size=num_stages, timeout=timeout
        )
        groups = {
            edge: dist.new_group([edge.source, edge.target], timeout=timeout, backend=backend)
            for edge in edges(num_stages)
        }
        links: dict[Channel, Link] = {}
        for edge in edges(num_stages):
            if stage in edge[1:]:
                end = _End(edge, incoming=edge.target == stage)
                links[edge] = _link(end, groups[edge], backend, emulation)
                if backend != "gloo":
                    _exchange_first_message(links[edge], end, device, timeout_s)
    except (RuntimeError, ValueError, LinkError) as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "(chosen by gloo)")
        reason = " ".join(str(error).split())[:200]
        raise StartError(
            f"cannot meet the other stages at {rendezvous.address}:"
            f"{rendezvous.port}, interface {interface}: {reason}"
        ) from error
    return links


def _link(
    end: _End, group: dist.ProcessGroup, backend: str, emulation: LinkEmulation | None
) -> Link:
    if backend != "gloo":
        return DeviceLink(end, group)
    return GlooLink(end, group) if emulation is None else EmulatedGlooLink(end, group, emulation)


def _exchange_first_message(link: Link, end: _End, device: torch.device, timeout_s: float) -> None:
    message = torch.zeros(1, device=device)
    handle = link.receive(message) if end.incoming else link.send(message)
    handle.wait(timeout_s)


def disconnect() -> None:
    """Leave all edges; call it once everything is drained."""
    if dist.is_initialized():
        dist.destroy_process_group()
