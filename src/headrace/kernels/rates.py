"""How fast this host's kernels are: run as a module, on the cores that are asked about."""

import sys
from collections.abc import Callable
from time import perf_counter

import msgspec
import torch

from headrace.kernels import path
from headrace.kernels.linear import Linear
from headrace.protocol.hosts import HostSpeed, KernelRates

# Of square weights, so many inputs and outputs: about the size of a layer's products.
_WIDTH = 2048
# Of weights that are read: beyond what one host's caches hold, except for the largest servers',
# whose stages then read their weights from there, too.
_READ_BYTES = 1 << 27
# Rows of a product that no longer waits for its weights.
_ROWS = 128
# Each is measured so many times: what disturbs, only slows.
_ROUNDS = 3
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def measure_speed() -> HostSpeed:
    """The rates of the path that is taken, with torch's threads. Takes some 0.5 s on two cores."""
    with torch.inference_mode():
        rates = {str(dtype).removeprefix("torch."): _rates(dtype) for dtype in _DTYPES}
    return HostSpeed(path.path_name(), rates)


def _rates(dtype: torch.dtype) -> KernelRates:
    values = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    weights = [Linear(values, None, dtype) for _ in range(max(1, _READ_BYTES // values.nbytes))]
    row, rows = (torch.ones(count, _WIDTH, dtype=dtype) for count in (1, _ROWS))
    row_out, rows_out = torch.empty_like(row), torch.empty_like(rows)

    def read() -> None:
        for weight in weights:
            weight(row, row_out)

    return KernelRates(
        read_bytes_per_s=sum(weight.nbytes for weight in weights) / _least_seconds(read),
        operations_per_s=2 * _ROWS * _WIDTH**2 / _least_seconds(lambda: weights[0](rows, rows_out)),
    )


def _least_seconds(call: Callable[[], object]) -> float:
    """After one call as a warm-up."""
    call()
    seconds = []
    for _ in range(_ROUNDS):
        began = perf_counter()
        call()
        seconds.append(perf_counter() - began)
    return min(seconds)


if __name__ == "__main__":
    path.choose_path()
    sys.stdout.buffer.write(msgspec.msgpack.encode(measure_speed()))
