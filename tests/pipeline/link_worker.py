"""One rank of the link tests: `link_worker.py SCENARIO RANK WORLD PORT STORE_FD` (-1: none).

Prints one JSON line with what it saw.
"""

import json
import os
import sys
import time

import torch

from headrace.pipeline.ledger import Channel, Handle, Tensors
from headrace.pipeline.links import Link, LinkError, Rendezvous, connect, disconnect

SMALL, LARGE = 4, 1 << 18
DEADLINE_S = 2.0


def tensor_of(channel: Channel, step: int, size: int) -> torch.Tensor:
    """Contents that tell edge and step."""
    return torch.full((size,), 1000 * channel.source + 100 * channel.target + step)


def exchange(links: dict[Channel, Link], rank: int) -> dict[str, object]:
    """Every edge at once, both directions, small and large; receives posted ahead."""
    steps = range(8)
    handles: list[tuple[Handle, torch.Tensor, torch.Tensor]] = []
    for step in steps:
        for channel, link in links.items():
            size = LARGE if step % 3 == 0 else SMALL
            expected = tensor_of(channel, step, size)
            if channel.target == rank:
                buffer = torch.zeros(size, dtype=expected.dtype)
                handles.append((link.receive(buffer), buffer, expected))
            else:
                handles.append((link.send(expected), expected, expected.clone()))
    # Waiting in another order than starting must be possible: each handle is its own.
    for handle, _, _ in reversed(handles):
        handle.wait(30.0)
    return {"right": all(torch.equal(buffer, expected) for _, buffer, expected in handles)}


def silent_peer(links: dict[Channel, Link], rank: int) -> dict[str, object]:
    """Rank 0 never sends; rank 1's wait must end with its deadline."""
    if rank == 0:
        time.sleep(3 * DEADLINE_S)
        return {}
    return failing_wait(links[Channel(Tensors.ACTIVATIONS, 0, 1)].receive(torch.zeros(SMALL)))


def dying_peer(links: dict[Channel, Link], rank: int) -> dict[str, object]:
    """Rank 0 vanishes while rank 1 waits for it."""
    if rank == 0:
        time.sleep(0.5)
        os._exit(9)
    return failing_wait(links[Channel(Tensors.ACTIVATIONS, 0, 1)].receive(torch.zeros(SMALL)))


def late_start(links: dict[Channel, Link], rank: int) -> dict[str, object]:
    """Rank 0 is gone before rank 1 starts a transfer; both directions."""
    if rank == 0:
        os._exit(9)
    time.sleep(1.5)
    errors = []
    for channel in (Channel(Tensors.ACTIVATIONS, 0, 1), Channel(Tensors.FEEDBACK, 1, 0)):
        link = links[channel]
        try:
            start = link.receive if channel.target == rank else link.send
            start(torch.zeros(SMALL)).wait(DEADLINE_S)
        except LinkError as error:
            errors.append((error.peer, str(error)))
    return {"errors": errors}


def failing_wait(handle: Handle) -> dict[str, object]:
    started = time.monotonic()
    try:
        handle.wait(DEADLINE_S)
    except LinkError as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    return {"error": None}


def listening() -> list[str]:
    """Local addresses of this process's listening sockets."""
    import psutil

    return [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]


def main() -> None:
    scenario, rank, world, port, store_fd = sys.argv[1], *map(int, sys.argv[2:6])
    meeting = Rendezvous("127.0.0.1", port, None if store_fd < 0 else store_fd)
    links = connect(meeting, rank, world, torch.device("cpu"), 30.0)
    addresses = listening()
    seen = {"exchange": exchange, "silent": silent_peer, "dying": dying_peer, "late": late_start}[
        scenario
    ](links, rank)
    print(json.dumps({**seen, "listening": addresses}), flush=True)
    if scenario == "exchange":
        disconnect()
    else:
        os._exit(0)


main()
