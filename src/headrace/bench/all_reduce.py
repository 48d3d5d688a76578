"""What it takes the shards of a stage to add up, by size: processes with cores of their own and
the memory that shards share, and nothing beside them.
"""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import msgspec
import torch

from headrace.bench.figures import spread
from headrace.bench.machine import machine, versions
from headrace.deployment.machine import this_host
from headrace.errors import UsageError
from headrace.host.alone import answer_alone
from headrace.host.cpus import stage_cpus
from headrace.kernels.exchange import Exchange, memory_size
from headrace.kernels.path import has_native, path_name

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
# Bytes of a round, and the most sums of one.
_ROUND_BYTES, _MOST = 16 << 20, 400
# As a rank with cores of its own has (pipeline/stage_worker.py).
_SPIN_S = 200e-6
# Seconds for another process to come.
_PATIENCE_S = 60.0


class _Task(msgspec.Struct, array_like=True):
    """memory: a path of the shared memory."""

    shard: int
    shards: int
    memory: str
    rounds: int


def measure_all_reduce(shards: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Microseconds of a sum of bfloat16, by its bytes: medians, least and most of rounds, the first
    of which does not count.

    Raises UsageError without native kernels or with more shards than cores, PipelineError if a
    process fails.
    """
    if not has_native():
        raise UsageError("shards add up by native kernels, which are missing")
    host = this_host()
    if shards > len(host.cores):
        raise UsageError(f"--tensor-parallel-size {shards}: there are {len(host.cores)} cores")
    cpus = stage_cpus(shards, 1, "auto", allowed=host.allowed_cpus, cores=host.cores)
    say(f"{shards} processes add up, {rounds} rounds")
    memory = os.memfd_create("headrace-sums")
    with closing(open(memory, "rb+")), ThreadPoolExecutor(shards) as processes:
        os.ftruncate(memory, memory_size(shards))
        path = f"/proc/{os.getpid()}/fd/{memory}"

        def run(shard: int) -> list[list[float]]:
            task = msgspec.msgpack.encode(_Task(shard, shards, path, rounds))
            answer = answer_alone(__name__, f"shard {shard}", cpus[shard], task)
            return msgspec.msgpack.decode(answer, type=list[list[float]])

        first, *_ = processes.map(run, range(shards))
    return {
        "shards": shards,
        "rounds": rounds,
        "kernels": path_name(),
        "sums": [
            {"size": size, **spread("us", [s * 1e6 for s in seconds])}
            for size, seconds in zip(SIZES, first, strict=True)
        ],
        "machine": machine(),
        "versions": versions(),
    }


def _seconds(task: _Task) -> list[list[float]]:
    """Of a sum, by size and round."""
    exchange = Exchange()
    memory = os.open(task.memory, os.O_RDWR)
    exchange.join(memory, task.shard, task.shards, spin_s=_SPIN_S, check=_fail_if_late)
    os.close(memory)
    buffers = [torch.zeros(size // 2, dtype=torch.bfloat16) for size in SIZES]
    seconds: list[list[float]] = [[] for _ in SIZES]
    for number in range(task.rounds + 1):
        for buffer, found in zip(buffers, seconds, strict=True):
            count = min(_MOST, _ROUND_BYTES // buffer.nbytes)
            exchange.all_reduce(buffer)
            began = time.perf_counter()
            for _ in range(count):
                exchange.all_reduce(buffer)
            if number:
                found.append((time.perf_counter() - began) / count)
    return seconds


def _fail_if_late(shard: int, waited_s: float) -> None:
    if waited_s > _PATIENCE_S:
        raise TimeoutError(f"shard {shard} does not come")


if __name__ == "__main__":
    given = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Task)
    sys.stdout.buffer.write(msgspec.msgpack.encode(_seconds(given)))
