"""What each kernel takes with a model's shapes, and what torch takes for the same."""

import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import msgspec
import torch

from headrace.bench.figures import spread
from headrace.bench.kernel_cases import CHUNK, CONTEXT, Call, Case, kernel_cases
from headrace.bench.machine import machine, versions
from headrace.bench.model_shape import ModelShape, shape_of
from headrace.bench.roofline import Dtype, read_program
from headrace.deployment.machine import this_host
from headrace.errors import StartError
from headrace.host.alone import answer_alone
from headrace.host.cpus import stage_cpus
from headrace.kernels import PATH_VARIABLE, path

# Seconds of a round, unless one call takes longer, and the most calls of a round.
_ROUND_S, _MOST_CALLS = 0.05, 100


class _Task(msgspec.Struct, array_like=True):
    shape: ModelShape
    dtype: str
    rows: list[int]
    rounds: int


class _Measured(msgspec.Struct, array_like=True):
    """kernels: the path that they take. cases: JSON of each."""

    kernels: str
    cases: list[dict[str, Any]]


def measure_kernels(
    model: str,
    dtype: Dtype,
    rows: list[int],
    threads: int | None,
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure every kernel at every number of rows, in a process with the cores and threads of a
    single stage; as JSON. say: told what runs.

    Raises ModelError if the model cannot be read, UsageError if it is synthetic or has
    experts, StartError if there are no native kernels, PipelineError if the process fails.
    """
    shape = shape_of(read_program(model))
    this = this_host()
    if not this.native_kernels:
        raise StartError(
            f"there are no native kernels to measure: unset {PATH_VARIABLE} if it is torch, else "
            "install a C++17 compiler, then headrace again"
        )
    (cpus,) = stage_cpus(1, threads, "auto", allowed=this.allowed_cpus, cores=this.cores)
    say("kernels, in a process of their own")
    task = msgspec.msgpack.encode(_Task(shape, dtype, rows, rounds))
    answer = msgspec.msgpack.decode(
        answer_alone(__name__, "measuring kernels", cpus, task), type=_Measured
    )
    return {
        "model": model,
        "dtype": dtype,
        "kernels": answer.kernels,
        "context": CONTEXT,
        "chunk": CHUNK,
        "rounds": rounds,
        "cpus": cpus.cpus,
        "threads": cpus.threads,
        "cases": answer.cases,
        "machine": machine(),
        "versions": versions(),
    }


def measure_case(case: Case, rounds: int) -> dict[str, Any]:
    """The case's figures: medians of the rounds' medians, the least of them and the most.

    The native kernel and torch take turns, a round each. ratio: how many times as long the faster
    way by torch takes, the reference.
    """
    ways = {"native": case.native, **case.by_torch}
    calls = {name: _calls_a_round(call) for name, call in ways.items()}
    medians: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            medians[name].append(median(_seconds(call) for _ in range(calls[name])))
    native_s = median(medians["native"])
    best = min(case.by_torch, key=lambda name: median(medians[name]))
    return {
        "kernel": case.kernel,
        "rows": case.rows,
        **spread("us", [s * 1e6 for s in medians["native"]]),
        "gflop_per_s": case.operations / native_s / 1e9 if case.operations else None,
        "gb_per_s": case.bytes_moved / native_s / 1e9,
        "reference": best,
        **spread("reference_us", [s * 1e6 for s in medians[best]]),
        "ratio": median(medians[best]) / native_s,
    }


def _calls_a_round(call: Call) -> int:
    """After two of them as a warm-up: the first may allocate."""
    call()
    return max(1, min(_MOST_CALLS, int(_ROUND_S / _seconds(call))))


def _seconds(call: Call) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


def _run() -> None:
    """In the process: the task comes on standard input, the answer goes to standard output."""
    task = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Task)
    path.choose_path()
    torch.manual_seed(0)
    with torch.inference_mode():
        cases = [
            measure_case(case, task.rounds)
            for case in kernel_cases(task.shape, getattr(torch, task.dtype), task.rows)
        ]
    sys.stdout.buffer.write(msgspec.msgpack.encode(_Measured(path.path_name(), cases)))


if __name__ == "__main__":
    _run()
