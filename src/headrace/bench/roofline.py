"""What the machine can do at most, and what that makes of a load: its limit in seconds.

Rates are measured through torch: reading memory, by adding up an array far larger than the caches;
and multiplying matrices, both the products of one of the model's layers at 2048 rows and a product
of square matrices, which shows what the cores do when the shapes are not in the way. The limit
counts what cannot be avoided, at the best rates, and each step takes the longer of two times:

    step = max(bytes / read rate, operations / product rate)

A load of R requests, I tokens in and O out, all running at once, on a model whose layers have W_L
weights together, an output projection of W_H weights, and in each layer H query heads and K
key-value heads of D numbers, in a dtype of s bytes:

    attended by a row at position p:  p + 1 positions, or the layer's sliding window
    operations of prefill:   2 W_L R I  +  2 W_H R
                             +  sum over layers of 4 H D R (sum of attended over the prompt)
    bytes of prefill:        s (W_L + W_H), for each 2048 tokens
    operations of a decode step:  R (2 (W_L + W_H) + sum over layers of 4 H D c)
    bytes of a decode step:       s (W_L + W_H)  +  sum over layers of R c 2 s K D

with c the average of attended over a row's decode steps, I + O/2 without a window. There are O - 1
decode steps: prefill ends in the first token. Left out, because small: norms, rotations, the
embedding's rows, activations, and writing the cache. The weights of several microbatches are read
once each: a pipeline of m microbatches on one machine's memory reads them m times a round.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, get_args

import torch

from headrace.bench.batch_run import Batch
from headrace.bench.machine import machine, usable_cores, versions
from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.locate import locate_model
from headrace.errors import UsageError
from headrace.model.read import model_from_gguf, model_from_huggingface
from headrace.protocol.model_config import StageShare
from headrace.protocol.program import (
    Attention,
    Experts,
    Linear,
    Matrix,
    Operation,
    Program,
)

Dtype = Literal["float32", "bfloat16"]

_ROWS = 2048
# Far beyond any cache, and a small part of any memory.
_READ_BYTES = 2**30


@dataclass(frozen=True)
class Rate:
    """Of some work a second, by repetition."""

    per_s: list[float]

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.per_s)

    def as_json(self) -> dict[str, float]:
        """In units of 10^9."""
        values = {"median": self.median, "min": min(self.per_s), "max": max(self.per_s)}
        return {name: value / 1e9 for name, value in values.items()}


@dataclass(frozen=True)
class Rates:
    """Of so many threads: bytes read a second, and operations a second in a dtype, of a layer's
    products and of a square one."""

    threads: int
    read: Rate
    products: dict[Dtype, Rate]
    squares: dict[Dtype, Rate]

    def as_json(self) -> dict[str, Any]:
        """In GB/s (10^9 bytes) and GFLOP/s."""
        answer: dict[str, Any] = {"threads": self.threads, "read_gb_per_s": self.read.as_json()}
        for dtype, rate in self.products.items():
            answer[f"{dtype}_gflop_per_s"] = rate.as_json()
            answer[f"{dtype}_square_gflop_per_s"] = self.squares[dtype].as_json()
        return answer

    def operations_per_s(self, dtype: Dtype) -> float:
        """The better one."""
        return max(self.products[dtype].median, self.squares[dtype].median)


@dataclass(frozen=True)
class Work:
    """What some step cannot avoid: operations, and bytes read."""

    operations: float
    bytes_read: float

    def seconds(self, read_per_s: float, operations_per_s: float) -> float:
        """At these rates, reading and computing at the same time."""
        return max(self.bytes_read / read_per_s, self.operations / operations_per_s)

    def as_json(self, read_per_s: float, operations_per_s: float) -> dict[str, Any]:
        """The work, how long it takes, and which rate that is due to."""
        reading = self.bytes_read / read_per_s
        computing = self.operations / operations_per_s
        return {
            "gflop": self.operations / 1e9,
            "mb_read": self.bytes_read / 1e6,
            "ms": self.seconds(read_per_s, operations_per_s) * 1e3,
            "bound_by": "memory" if reading > computing else "arithmetic",
        }


def measure_roofline(
    model: str, dtype: Dtype, batch: Batch, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The machine's rates with one thread and with all, and the load's limit; as JSON.

    Each rate is measured `rounds` times after a warm-up. say: told what runs. Raises ModelError if
    the model cannot be read, UsageError if it is synthetic.
    """
    program = read_program(model)
    counts = sorted({1, usable_cores()})
    rates = []
    before = torch.get_num_threads()
    try:
        for threads in counts:
            torch.set_num_threads(threads)
            many = f"{threads} thread{'s' * (threads > 1)}"
            say(f"reading, {many}")
            read = read_rate(rounds)
            products: dict[Dtype, Rate] = {}
            squares: dict[Dtype, Rate] = {}
            for name in get_args(Dtype):
                say(f"{name} products, {many}")
                products[name] = product_rate(_layer_shapes(program), name, rounds)
                squares[name] = product_rate([(_ROWS, _ROWS)], name, rounds)
            rates.append(Rates(threads, read, products, squares))
    finally:
        torch.set_num_threads(before)
    return {
        "rows": _ROWS,
        "rounds": rounds,
        "rates": [rate.as_json() for rate in rates],
        "limit": {"model": model, **limit(program, dtype, batch, rates)},
        "machine": machine(),
        "versions": versions(),
    }


def limit(program: Program, dtype: Dtype, batch: Batch, rates: list[Rates]) -> dict[str, Any]:
    """The shortest time for the load at the best of these rates, by the formulas above; as JSON.

    Products of bfloat16 numbers may be computed in float32 arithmetic: whichever is faster counts.
    """
    usable: list[Dtype] = ["float32"] if dtype == "float32" else ["bfloat16", "float32"]
    best = {name: max(rate.operations_per_s(name) for rate in rates) for name in usable}
    arithmetic = max(usable, key=lambda name: best[name])
    read_per_s, operations_per_s = max(rate.read.median for rate in rates), best[arithmetic]
    prefill, step = prefill_work(program, dtype, batch), decode_work(program, dtype, batch)
    steps = batch.output_len - 1
    seconds = prefill.seconds(read_per_s, operations_per_s)
    seconds += steps * step.seconds(read_per_s, operations_per_s)
    return {
        "dtype": dtype,
        "num_prompts": batch.num_prompts,
        "input_len": batch.input_len,
        "output_len": batch.output_len,
        "read_gb_per_s": read_per_s / 1e9,
        "gflop_per_s": operations_per_s / 1e9,
        "arithmetic": arithmetic,
        "prefill": prefill.as_json(read_per_s, operations_per_s),
        "decode_step": step.as_json(read_per_s, operations_per_s),
        "decode_steps": steps,
        "seconds": seconds,
        "output_tokens_per_s": batch.num_prompts * batch.output_len / seconds,
    }


def prefill_work(program: Program, dtype: Dtype, batch: Batch) -> Work:
    """Of all prompts together."""
    tokens = batch.num_prompts * batch.input_len
    layers, head = _multiplied(program.operations), _multiplied(program.head)
    products = 2 * (layers * tokens + head * batch.num_prompts)
    read = _read(program.operations, min(tokens, _ROWS)) + head
    attention = batch.num_prompts * sum(
        _operations_a_position(program, layer) * _attended(layer, position)
        for layer in _attentions(program)
        for position in range(batch.input_len)
    )
    return Work(products + attention, -(-tokens // _ROWS) * read * _size(dtype))


def decode_work(program: Program, dtype: Dtype, batch: Batch) -> Work:
    """Of one step of all requests, on the average of a request's steps; none if there are none."""
    positions = range(batch.input_len, batch.input_len + batch.output_len - 1)
    if not positions:
        return Work(0, 0)
    rows, every = batch.num_prompts, (*program.operations, *program.head)
    operations, read = 2.0 * _multiplied(every), 0.0
    for layer in _attentions(program):
        context = sum(_attended(layer, position) for position in positions) / len(positions)
        operations += _operations_a_position(program, layer) * context
        cache = program.caches[layer.cache]
        read += 2 * cache.kv_heads * cache.head_dim * _size(dtype) * context
    return Work(rows * operations, _read(every, rows) * _size(dtype) + rows * read)


def _attentions(program: Program) -> list[Attention]:
    return [each for each in program.operations if isinstance(each, Attention)]


def _attended(layer: Attention, position: int) -> int:
    """Positions that the row at this position attends to."""
    return min(position + 1, layer.window or position + 1)


def _operations_a_position(program: Program, layer: Attention) -> int:
    """A multiplication and an addition for each number of a key, and the same for a value."""
    return 4 * layer.heads * program.caches[layer.cache].head_dim


def _multiplied(operations: tuple[Operation, ...]) -> int:
    """Weights that a row is multiplied by, in numbers."""
    mixtures = [each for each in operations if isinstance(each, Experts)]
    return _shared(operations) + sum(each.chosen * _expert(each) for each in mixtures)


def _read(operations: tuple[Operation, ...], rows: int) -> float:
    """Weights that so many rows have read, in numbers; each is taken to choose experts anew."""
    mixtures = [each for each in operations if isinstance(each, Experts)]
    return _shared(operations) + sum(
        each.count * _expert(each) * (1 - (1 - each.chosen / each.count) ** rows)
        for each in mixtures
    )


def _shared(operations: tuple[Operation, ...]) -> int:
    """Weights of the products that all rows pass, in numbers."""
    return sum(_numbers(each.weight) for each in operations if isinstance(each, Linear))


def _expert(mixture: Experts) -> int:
    return _numbers(mixture.gate_up) + _numbers(mixture.down)


def _numbers(matrix: Matrix) -> int:
    return matrix.outs * matrix.ins


def _size(dtype: Dtype) -> int:
    return int(getattr(torch, dtype).itemsize)


def read_rate(rounds: int) -> Rate:
    """Bytes a second that this process's threads read."""
    array = torch.ones(_READ_BYTES // 4)
    return _rate(array.nbytes, rounds, lambda: array.sum())


def product_rate(shapes: list[tuple[int, int]], dtype: Dtype, rounds: int) -> Rate:
    """Operations a second of products of 2048 rows with weights of these inputs and outputs."""
    kind = getattr(torch, dtype)
    inputs = {width: torch.randn(_ROWS, width).to(kind) for width, _ in shapes}
    weights = [torch.randn(out, width).to(kind) for width, out in shapes]

    def layer() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    with torch.inference_mode():
        return _rate(2 * _ROWS * sum(weight.numel() for weight in weights), rounds, layer)


def _layer_shapes(program: Program) -> list[tuple[int, int]]:
    """Inputs and outputs of a layer's products."""
    products = {each.label: each.weight for each in program.operations if isinstance(each, Linear)}
    return [(weight.ins, weight.outs) for weight in products.values()]


def _rate(work: float, rounds: int, run: Callable[[], object]) -> Rate:
    run()
    per_s = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        per_s.append(work / (time.perf_counter() - began))
    return Rate(per_s)


def read_program(model: str) -> Program:
    """Of all of a model on disk. Raises ModelError if it cannot be read, UsageError if it is
    synthetic."""
    files = locate_model(model)
    if files.kind == "synthetic":
        raise UsageError("--model must be a real one: a synthetic model's stages compute nothing")
    if files.kind == "gguf":
        read = model_from_gguf(read_gguf(files.path))
    else:
        read = model_from_huggingface(files.path)
    return read.program(StageShare(0, read.sizes.num_layers, embeds=True, samples=True))
