"""Edges over torch.distributed, and what waiting means on each of its backends.

Every directed edge is a process group of its own.

Each incoming edge has a thread that finishes one watched receive after the other, and so notes when
each was complete, however late the stage looks. The stage's wait() blocks its thread until then.
Waking two threads takes longer than waking one, so a stage has only some of its receives watched,
and finishes the others itself. Of sends and of those nobody knows the moment.

gloo (CPU): bytes move on gloo's threads once both sides have started. Waiting blocks the thread in
gloo, without computing.

NCCL, XCCL (CUDA, XPU): transfers run on streams of their own, after what the current stream had to
do when they were started. A device cannot be told to give up at a deadline, so the host asks again
and again whether the transfer is complete. wait() orders the current stream after it, and the
buffer may then be used on that stream. A small send may be complete before its receive is posted.
A dead link's group is aborted, since its transfers would keep the device busy for ever. A receive
that is posted occupies a piece of the device until it is complete: what makes the device wait for
all its work (freeing memory, loading a kernel at its first use) waits for the receive too, so set
CUDA_MODULE_LOADING=EAGER. Every edge carries a message at the start, in the order of edges(),
since the first one on a communicator blocks until the peer has come.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from headrace.errors import StartError
from headrace.pipeline.ledger import Channel, Handle
from headrace.pipeline.links import End, Link, LinkError, SlowLine, edges, sleep_until
from headrace.protocol.messages import LinkEmulation
from headrace.protocol.ranks import Ranks

# torch.distributed's name of the backend for each kind of device, and the variable that says which
# network interface it uses.
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
_INTERFACE = {
    "gloo": "GLOO_SOCKET_IFNAME",
    "nccl": "NCCL_SOCKET_IFNAME",
    "xccl": "CCL_KVS_IFACE",
}

# NCCL's watchdog must neither abort communicators nor end the process: deadlines are kept here.
_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}

# For torch.distributed's own deadlines, where ours are kept elsewhere.
_FOREVER_S = 365 * 86400.0
_POLL_S = 50e-6


# Waiting, by backend


def _finish_on_gloo(work: dist.Work, timeout_s: float) -> None:
    """Return once it is complete; TimeoutError, or RuntimeError if it cannot be."""
    try:
        # gloo takes whole milliseconds, and none for "no deadline".
        work.wait(timedelta(milliseconds=max(1, round(timeout_s * 1e3))))
    except RuntimeError as error:
        if "imed out" in str(error):
            raise TimeoutError from error
        raise


def _finish_on_device(work: dist.Work, timeout_s: float) -> None:
    """Return once it is complete; TimeoutError, or RuntimeError if it cannot be."""
    deadline = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_POLL_S)
    # Completed may mean failed. With a timeout, wait() raises then; without, it does not.
    work.wait(timedelta(seconds=1))


@dataclass(frozen=True)
class _Unwatched:
    """A send or a receive that the stage finishes itself."""

    link: "GroupLink"
    work: dist.Work

    def wait(self, timeout_s: float) -> None:
        try:
            self.link.finish(self.work, timeout_s)
        except TimeoutError as error:
            self.link.give_up()
            self.link.end.late(timeout_s, error)
        except (RuntimeError, ConnectionError) as error:
            self.link.give_up()
            self.link.end.gone(error)


@dataclass(eq=False)
class _Watched:
    """A receive that the edge's thread finishes. at: when it is complete; may be still to come."""

    link: "GroupLink"
    work: dist.Work
    size: int
    posted_at: float
    at: float = 0.0
    error: BaseException | None = None
    settled: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout_s: float) -> float:
        deadline = time.monotonic() + timeout_s
        in_time = self.settled.wait(timeout_s)
        if in_time and self.error is not None:
            self.link.end.gone(self.error)
        if in_time:
            sleep_until(min(self.at, deadline))
            in_time = self.at <= deadline
        if not in_time:
            self.link.give_up()
            self.link.end.late(timeout_s)
        if self.link.on_device:
            self.work.wait()
        return self.at


class GroupLink:
    """An edge over a process group of a kind of device. line: makes it slower than it is."""

    def __init__(
        self, end: End, group: dist.ProcessGroup, device: str, line: SlowLine | None
    ) -> None:
        self.end = end
        self.on_device = device != "cpu"
        self._group, self._device, self._line = group, device, line
        self._peer_in_group = dist.get_group_rank(group, end.peer)
        self._dead = False
        self._posted: queue.SimpleQueue[_Watched] = queue.SimpleQueue()
        if end.incoming:
            _start_thread(f"arrivals of {end.channel.tensors}", self._finish_receives)

    def send(self, tensor: torch.Tensor) -> Handle:
        """As Link says."""
        return _Unwatched(self, self._start(self._group.send, tensor))

    def receive(self, buffer: torch.Tensor, watched: bool = True) -> Handle:
        """As Link says. On a slow line every receive is watched."""
        posted_at = time.monotonic()
        work = self._start(self._group.recv, buffer)
        if not watched and self._line is None:
            return _Unwatched(self, work)
        receive = _Watched(self, work, buffer.nbytes, posted_at)
        self._posted.put(receive)
        return receive

    def finish(self, work: dist.Work, timeout_s: float) -> None:
        """Block until it is complete; TimeoutError, or RuntimeError or ConnectionError if lost."""
        (_finish_on_device if self.on_device else _finish_on_gloo)(work, timeout_s)
        # An aborted transfer looks complete on a device.
        self._check_alive()

    def give_up(self) -> None:
        """Declare the link dead: no transfer survives, and the peer learns of it."""
        if not self._dead:
            self._dead = True
            # Not here: on a device it may take long, and the caller has a deadline to keep.
            _start_thread(f"abort of {self.end.channel.tensors}", self._abort)

    def _start(self, operation: Callable[..., dist.Work], tensor: torch.Tensor) -> dist.Work:
        # The group's own operation: isend() and irecv() are these after many checks.
        try:
            self._check_alive()
            return operation([tensor], self._peer_in_group, 0)
        except (RuntimeError, ConnectionError) as error:
            self.give_up()
            self.end.gone(error)

    def _finish_receives(self) -> None:
        while True:
            receive = self._posted.get()
            try:
                self.finish(receive.work, _FOREVER_S)
            except Exception as error:
                # Whatever it is: nobody else could tell who waits.
                self.give_up()
                receive.error = error
            else:
                receive.at = time.monotonic()
                if self._line is not None:
                    receive.at = self._line.arrival(receive.posted_at, receive.at, receive.size)
            receive.settled.set()

    def _check_alive(self) -> None:
        if self._dead:
            raise ConnectionError("the link was given up")

    def _abort(self) -> None:
        with contextlib.suppress(RuntimeError):
            if self.on_device:
                self._group._get_backend(torch.device(self._device)).abort()
            else:
                # gloo's own abort() leaves transfers waiting, while one that runs out of time
                # closes the whole group. With this tag nothing can come.
                work = dist.irecv(torch.empty(1), self.end.peer, group=self._group, tag=1)
                assert work is not None
                work.wait(timedelta(milliseconds=1))


def _start_thread(name: str, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


# Setting up


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
    rank: int,
    ranks: Ranks,
    device: torch.device,
    timeout_s: float,
    emulation: LinkEmulation | None = None,
) -> dict[Channel, Link]:
    """Join the other ranks and set up this rank's ends of all its edges.

    emulation: make the edges slower than they are. Raises StartError naming the address if the
    others do not come within timeout_s.
    """
    if ranks.num_stages == 1:
        return {}
    timeout = timedelta(seconds=timeout_s)
    backend = BACKENDS[device.type]
    if backend == "nccl":
        os.environ.update(_NCCL_SETTINGS)
    try:
        store = TCPStore(
            rendezvous.address,
            rendezvous.port,
            world_size=ranks.count,
            is_master=rendezvous.store_fd is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=rendezvous.store_fd,
        )
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=ranks.count, timeout=timeout
        )
        # gloo's groups connect when they are made; others have no use for a deadline.
        of_groups = timeout if backend == "gloo" else timedelta(seconds=_FOREVER_S)
        groups = {
            edge: dist.new_group([edge.source, edge.target], timeout=of_groups, backend=backend)
            for edge in edges(ranks)
        }
        links: dict[Channel, Link] = {}
        for edge, group in groups.items():
            if rank in edge[1:]:
                end = End(edge, incoming=edge.target == rank, ranks=ranks)
                line = None if emulation is None else SlowLine(emulation)
                links[edge] = GroupLink(end, group, device.type, line)
                if backend != "gloo":
                    _exchange_first_message(links[edge], end, device, timeout_s)
    except (RuntimeError, ValueError, LinkError) as error:
        variable = _INTERFACE[backend]
        interface = os.environ.get(variable, f"of {backend}'s choice (or set {variable})")
        reason = " ".join(str(error).split())[:200]
        raise StartError(
            f"cannot meet the other stages at {rendezvous.address}:"
            f"{rendezvous.port}, interface {interface}: {reason}"
        ) from error
    return links


def _exchange_first_message(link: Link, end: End, device: torch.device, timeout_s: float) -> None:
    message = torch.zeros(1, device=device)
    handle = link.receive(message) if end.incoming else link.send(message)
    handle.wait(timeout_s)


def disconnect() -> None:
    """Leave all edges; call it once everything is drained."""
    if dist.is_initialized():
        dist.destroy_process_group()
