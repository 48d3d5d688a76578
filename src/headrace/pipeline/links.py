"""Edges between stages over torch.distributed, and what waiting means on each backend.

Every directed edge is a process group of its own, so that nothing queues behind anything else.

gloo (CPU): starting a send or a receive returns at once; bytes move on gloo's threads once both
sides have started. wait() blocks the host thread. A receive's buffer must live, untouched, until
its wait returns, and so must a send's: the ledger holds both. A wait that runs out of time closes
the whole group, so a link never survives it: LinkError, and the pipeline ends.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from headrace.errors import StartError
from headrace.pipeline.ledger import Channel, Handle, Tensors

# torch.distributed's name of the backend for each kind of device.
BACKENDS = {"cpu": "gloo"}


class LinkError(Exception):
    """A transfer failed: the peer is gone, or did not do its part in time."""

    def __init__(self, message: str, peer: int) -> None:
        super().__init__(message)
        self.peer = peer


@dataclass(frozen=True)
class _WorkHandle:
    work: dist.Work
    what: str
    peer: int

    def wait(self, timeout_s: float) -> None:
        try:
            self.work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if "imed out" not in str(error):
                _fail(self.what, self.peer, error)
            raise LinkError(
                f"{self.what} stage {self.peer}: nothing came within {timeout_s:g} s (if a step "
                "may take that long, raise --stall-timeout)",
                self.peer,
            ) from error


def _fail(what: str, peer: int, error: RuntimeError) -> NoReturn:
    raise LinkError(f"{what} stage {peer}: the link is gone", peer) from error


@dataclass(frozen=True)
class Link:
    """One stage's end of a directed edge."""

    channel: Channel
    group: dist.ProcessGroup

    def send(self, tensor: torch.Tensor) -> Handle:
        """Start sending a contiguous tensor; LinkError if the peer is known to be gone."""
        what = f"sending {self.channel.tensors} to"
        return self._start(dist.isend, tensor, what, self.channel.target)

    def receive(self, buffer: torch.Tensor) -> Handle:
        """Start receiving into a contiguous buffer of the sender's shape and dtype.

        LinkError if the peer is known to be gone.
        """
        what = f"waiting for {self.channel.tensors} from"
        return self._start(dist.irecv, buffer, what, self.channel.source)

    def _start(
        self,
        operation: Callable[..., dist.Work | None],
        tensor: torch.Tensor,
        what: str,
        peer: int,
    ) -> Handle:
        try:
            work = operation(tensor, peer, group=self.group)
        except RuntimeError as error:
            _fail(what, peer, error)
        assert work is not None, "this rank is not part of the edge"
        return _WorkHandle(work, what, peer)


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
    rendezvous: Rendezvous, stage: int, num_stages: int, device: torch.device, timeout_s: float
) -> dict[Channel, Link]:
    """Join the other stages and set up this stage's ends of all its edges.

    Raises StartError naming the address if the others do not come within timeout_s.
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
    except (RuntimeError, ValueError) as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "(chosen by gloo)")
        reason = " ".join(str(error).split())[:200]
        raise StartError(
            f"cannot meet the other stages at {rendezvous.address}:"
            f"{rendezvous.port}, interface {interface}: {reason}"
        ) from error
    return {edge: Link(edge, group) for edge, group in groups.items() if stage in edge[1:]}


def disconnect() -> None:
    """Leave all edges; call it once everything is drained."""
    if dist.is_initialized():
        dist.destroy_process_group()
