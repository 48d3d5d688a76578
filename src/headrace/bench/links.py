"""What a message between two stages takes, by each backend that carries tensors between processes
of this machine.

Two processes have links of all backends between them, those that stages have, and each the cores
that a stage of two would have. Rounds of all backends and sizes are interleaved, and begin with one
that does not count. Beside them, what copying as many bytes takes a core.
"""

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, get_args

import msgspec
import torch.distributed as dist

from headrace.bench import link_end
from headrace.bench.figures import spread
from headrace.bench.link_end import (
    SAY_EACH,
    Backend,
    Copies,
    Done,
    Listening,
    OneWay,
    Order,
    RoundTrips,
    SetUp,
)
from headrace.bench.machine import machine, versions
from headrace.deployment.machine import this_host
from headrace.errors import PipelineError
from headrace.host.cpus import StageCpus, stage_cpus
from headrace.host.pinning import start_process

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)
# Bytes of a round, and the most messages.
_ROUND_TRIPS, _ONE_WAY = (8 << 20, 200), (64 << 20, 2000)


def backends() -> list[Backend]:
    """Those that this machine has."""
    missing = () if dist.is_gloo_available() else ("gloo",)
    return [backend for backend in get_args(Backend) if backend not in missing]


@dataclass(frozen=True)
class _Process:
    """One of the two. complaints: a file."""

    popen: "subprocess.Popen[bytes]"
    complaints: IO[bytes]

    def tell(self, order: Order) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(msgspec.json.encode(order) + b"\n")
        self.popen.stdin.flush()

    def hear(self) -> Listening | Done:
        """Raises PipelineError, with its last words, if it has ended."""
        assert self.popen.stdout is not None
        if line := self.popen.stdout.readline():
            return msgspec.json.decode(line, type=Listening | Done)
        self.complaints.seek(0)
        said = self.complaints.read().decode(errors="replace").strip().splitlines()
        raise PipelineError(f"measuring links failed: {said[-1] if said else 'it said nothing'}")

    def done(self) -> Done:
        """The figures of what it was told to measure."""
        answer = self.hear()
        assert isinstance(answer, Done)
        return answer


@dataclass
class _Seconds:
    """Of a backend and a size, by round. cpu: processor time of both processes, one way."""

    round_trip: list[float] = field(default_factory=list)
    one_way: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def measure_links(rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure every backend with messages of every size; as JSON. say: told what runs.

    A case's us: half a round trip. gb_per_s: many messages one way, 10^9 bytes a second; over that
    of a copy, of_copy. cores: that both processes kept busy meanwhile, together. Raises
    PipelineError if a process fails.
    """
    this = this_host()
    cpus = stage_cpus(2, None, "auto", allowed=this.allowed_cpus, cores=this.cores)
    names = backends()
    say("starting two processes")
    cases = {(name, size): _Seconds() for name in names for size in SIZES}
    copies: dict[int, list[float]] = {size: [] for size in SIZES}
    with _two_processes(names, cpus) as pair:
        for number in range(rounds + 1):
            say(f"round {number} of {rounds}" if number else "warm-up")
            for size in SIZES:
                copy_s = _both(pair[:1], Copies(size, _count(size, *_ROUND_TRIPS)))[0].seconds
                if number:
                    copies[size].append(copy_s)
                for name in names:
                    count = _count(size, *_ROUND_TRIPS)
                    trip, _ = _both(pair, RoundTrips(name, size, count))
                    count = _count(size, *_ONE_WAY)
                    sender, receiver = _both(pair, OneWay(name, size, count))
                    if number:
                        seconds = cases[name, size]
                        seconds.round_trip.append(trip.seconds)
                        seconds.one_way.append(sender.seconds / count)
                        seconds.cpu.append((sender.cpu_s + receiver.cpu_s) / count)
    copied = {size: _rate(size, seconds) for size, seconds in copies.items()}
    return {
        "rounds": rounds,
        "cpus": [each.cpus for each in cpus],
        "copy": [{"size": size, **copied[size]} for size in SIZES],
        "cases": [
            {
                "backend": name,
                "size": size,
                **spread("us", [s / 2 * 1e6 for s in seconds.round_trip]),
                **(rate := _rate(size, seconds.one_way)),
                "of_copy": rate["gb_per_s"] / copied[size]["gb_per_s"],
                "cores": sum(seconds.cpu) / sum(seconds.one_way),
            }
            for (name, size), seconds in cases.items()
        ],
        "machine": machine(),
        "versions": versions(),
    }


def _rate(size: int, seconds: list[float]) -> dict[str, float]:
    return spread("gb_per_s", [size / each / 1e9 for each in seconds])


def _count(size: int, total: int, most: int) -> int:
    """Messages of this size in a round."""
    count = min(most, total // size)
    return max(SAY_EACH, count - count % SAY_EACH)


def _both(processes: list[_Process], order: Order) -> list[Done]:
    """What each measured."""
    for process in processes:
        process.tell(order)
    return [process.done() for process in processes]


@contextmanager
def _two_processes(names: list[Backend], cpus: list[StageCpus]) -> Iterator[list[_Process]]:
    """With links between them. They are gone afterwards."""
    secret = secrets.token_bytes(32)
    with (
        tempfile.TemporaryDirectory(prefix="hr-links-") as folder,
        tempfile.TemporaryFile() as complaints,
    ):
        processes = [_Process(_start(each, complaints), complaints) for each in cpus]
        try:
            listening = []
            for rank, process in enumerate(processes):
                process.tell(SetUp(rank, cpus[rank].cpus, names, folder, secret))
            for process in processes:
                listening.append(process.hear())
            for process, others in zip(processes, reversed(listening), strict=True):
                assert isinstance(others, Listening)
                process.tell(others)
            for process in processes:
                process.done()
            yield processes
        finally:
            for process in processes:
                process.popen.kill()
                process.popen.wait()


def _start(cpus: StageCpus, complaints: IO[bytes]) -> "subprocess.Popen[bytes]":
    return start_process(
        [sys.executable, "-P", "-m", link_end.__name__],
        cpus,
        {**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=complaints,
    )
