"""Worlds of real processes that run link scenarios, forked from one that has imported torch.

Reads one JSON request a line, {"backend", "world", "scenarios", "emulation"}, and answers each with
one line: by rank, {"outcomes": {scenario: traceback or null}, "listening": addresses}, or null if
the rank said nothing. scenarios run one after the other on the same links.
"""

import faulthandler
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.pipeline.group_link import Rendezvous
from headrace.pipeline.host_edges import HostEdges
from headrace.pipeline.links import LinkError
from headrace.pipeline.rendezvous import Meeting
from headrace.protocol.messages import EdgeAddress, HostLinks, LinkEmulation
from headrace.protocol.ranks import Ranks
from pipeline.link_scenarios import ALL, DEADLY, Die, Meet, Pause, Rank, Scenario, Wait

_DEVICES = {
    "local": "cpu",
    "curve": "cpu",
    "plain": "cpu",
    "gloo": "cpu",
    "nccl": "cuda",
    "xccl": "xpu",
}
# Seconds for one world, all its scenarios together; then each rank says where it hangs.
_PATIENCE = 60.0

_FORK = multiprocessing.get_context("fork")


def play(scenario: Scenario, meet: Callable[[], object]) -> None:
    """Run a rank's scenario in earnest."""
    value: Any = None
    error: LinkError | None = None
    while True:
        try:
            step = scenario.send(value) if error is None else scenario.throw(error)
        except StopIteration:
            return
        value = error = None
        match step:
            case Wait(handle, timeout_s):
                try:
                    value = handle.wait(timeout_s)
                except LinkError as raised:
                    error = raised
            case Pause(seconds):
                time.sleep(seconds)
            case Meet():
                meet()
            case Die():
                os._exit(9)


def rank_main(
    request: dict[str, Any],
    number: int,
    port: int,
    store_fd: int,
    folder: Path,
    barrier: Barrier,
    out: Connection,
) -> None:
    faulthandler.dump_traceback_later(_PATIENCE, exit=True)
    torch.set_num_threads(1)
    kind = _DEVICES[request["backend"]]
    device = torch.device("cpu")
    if kind != "cpu":
        module = torch.get_device_module(kind)
        device = torch.device(kind, number % module.device_count())
        module.set_device(device)
        if module.device_count() < request["world"]:
            share_one_device(number)
    emulation = request["emulation"] and LinkEmulation(*request["emulation"])
    ranks = Ranks(request["world"])
    own = request["backend"] in ("local", "curve", "plain")
    if own:
        # The store is the others'.
        os.close(store_fd)
    # Each rank as if it were on a host of its own.
    between = None
    if request["backend"] in ("curve", "plain"):
        encrypted = request["backend"] == "curve"
        hosts = HostLinks(list(range(ranks.count)), "127.0.0.1", bytes(32), encrypted)
        between = HostEdges(hosts, epoch=0)
    meeting = Meeting(number, ranks, "local" if own else "gloo", folder, emulation, between)
    # As the engine does, which passes on where ranks listen.
    (folder / f"listening-{number}").write_bytes(msgspec.json.encode(meeting.listening))
    barrier.wait()
    listening_at = [
        address
        for peer in range(ranks.count)
        for address in msgspec.json.decode(
            (folder / f"listening-{peer}").read_bytes(), type=list[EdgeAddress]
        )
    ]
    store = Rendezvous("127.0.0.1", port, store_fd if number == 0 else None)
    peers = [address for address in listening_at if address.source == number]
    links = meeting.connect(peers, store, device, 60.0, lambda: None)
    buffers_sends = own or kind != "cpu"
    rank = Rank(number, links, device, time.monotonic, emulation or LinkEmulation(), buffers_sends)
    addresses = listening() if kind == "cpu" else []
    outcomes: dict[str, str | None] = {}
    for name in request["scenarios"]:
        try:
            play(ALL[name](rank), barrier.wait)
            outcomes[name] = None
        except threading.BrokenBarrierError:
            outcomes[name] = "another rank failed"
            break
        except Exception:
            outcomes[name] = traceback.format_exc()
            # The others need not wait for this rank, and the links are of no more use.
            barrier.abort()
            break
    out.send({"outcomes": outcomes, "listening": addresses})
    if not DEADLY.keys() & outcomes.keys() and not any(outcomes.values()):
        meeting.close()
    os._exit(0)


def share_one_device(number: int) -> None:
    """Make NCCL take each rank for a host of its own: it refuses two ranks on one host's device."""
    os.environ.update(
        NCCL_HOSTID=f"rank-{number}",
        NCCL_NET="Socket",
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
    )


def listening() -> list[str]:
    """Local addresses of this process's listening sockets."""
    import psutil

    return [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]


def run_world(request: dict[str, Any]) -> list[dict[str, Any] | None]:
    barrier = _FORK.Barrier(request["world"])
    pipes = [_FORK.Pipe(duplex=False) for _ in range(request["world"])]
    with (
        socket.create_server(("127.0.0.1", 0)) as master,
        tempfile.TemporaryDirectory(prefix="hr-") as folder,
    ):
        ranks = [
            _FORK.Process(
                target=rank_main,
                args=(
                    *(request, number, master.getsockname()[1], master.fileno()),
                    *(Path(folder), barrier, out),
                ),
            )
            for number, (_, out) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        answers: list[dict[str, Any] | None] = []
        try:
            for process, (answer, out) in zip(ranks, pipes, strict=True):
                out.close()
                answers.append(_answer_of(process, answer))
                answer.close()
        finally:
            for process in ranks:
                process.join(5)
                process.kill()
                process.join()
        return answers


def _answer_of(
    process: multiprocessing.process.BaseProcess, answer: Connection
) -> dict[str, Any] | None:
    multiprocessing.connection.wait([answer, process.sentinel], _PATIENCE + 10)
    try:
        said: dict[str, Any] | None = answer.recv() if answer.poll() else None
    except EOFError:
        # All the others, who have its end of the pipe too, have ended already.
        return None
    return said


def main() -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    # A kernel that is loaded at its first use would wait for receives that are posted.
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    for line in sys.stdin:
        print(json.dumps(run_world(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
