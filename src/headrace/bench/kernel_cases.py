"""Every kernel with a model's shapes, and the torch that it is measured against.

What the model has anew in each layer, weights and cache, is there in many copies, which calls take
in turn, so that it comes from memory as it does in the model; what one kernel hands to the next
stays where it is.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from headrace.bench.model_shape import ModelShape
from headrace.config import EngineConfig
from headrace.kernels import REFERENCE, path, reference
from headrace.kernels.attention import paged_attention, rotate_and_write
from headrace.kernels.batch import AttentionBatch
from headrace.kernels.elementwise import activate_and_multiply, add_rms_norm, embed
from headrace.kernels.kv_cache import KvCache, bytes_per_block, new_cache
from headrace.kernels.linear import Linear, computes_natively, pack
from headrace.kernels.sampling import CHOICE, choose
from headrace.model.rope import rotation_tables
from headrace.protocol.plan import Admission, Sampling
from headrace.sampling.sampler import choose_by_torch
from headrace.sampling.slot import SlotSampling

# Positions of a decode row's sequence, and tokens of a prompt's chunk.
CONTEXT, CHUNK = 288, 512

# All copies together: more than caches hold. Of the smallest things fewer do, and are there sooner.
_COPIES_BYTES = 2**28
_MOST_COPIES = 512

# How rows sample: the likeliest, any, or one of the likely ones.
_SAMPLING = {
    "greedy": Sampling(seed=0, temperature=0.0),
    "draw": Sampling(seed=0),
    "top_k_top_p": Sampling(seed=0, top_k=50, top_p=0.9),
}
# A model's likeliest tokens stand out; those of a standard deviation of 1 do not.
_LOGITS_DEVIATION = 3.0

Call = Callable[[], object]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Case:
    """One kernel on so many rows (tokens), native and by torch in one way or several.

    operations: additions and multiplications; 0 where something else takes the time. bytes_moved:
    read and written at least.
    """

    kernel: str
    rows: int
    native: Call
    by_torch: dict[str, Call]
    operations: int
    bytes_moved: int


def kernel_cases(shape: ModelShape, dtype: torch.dtype, rows: list[int]) -> Iterator[Case]:
    """Each kernel at each number of rows, and attention over a prompt's chunk.

    Decode rows are at CONTEXT positions. Neither attention nor rotation where the native ones do
    not take the model's heads. Cases are made one by one: all together would take gigabytes.
    """
    if shape.head_dim % 16 == 0:
        for count in rows:
            yield _attention_case("attention decode", shape, dtype, count, 1, CONTEXT)
        yield _attention_case("attention prefill", shape, dtype, 1, CHUNK, CHUNK)
        for count in rows:
            yield _rotate_case(shape, dtype, count)
    for name, (outs, ins) in shape.products.items():
        yield from _product_cases(name, outs, ins, dtype, rows)
    for count in rows:
        yield _norm_case(shape, dtype, count)
    for count in rows:
        yield _silu_case(shape, dtype, count)
    table = _random(dtype, shape.vocab_size, shape.hidden_size)
    for count in rows:
        yield _embed_case(table, count)
    logits = (_LOGITS_DEVIATION * torch.randn(max(rows), shape.vocab_size)).to(dtype)
    for name, sampling in _SAMPLING.items():
        for count in rows:
            yield _choose_case(name, sampling, logits[:count])


def _attention_case(
    name: str, shape: ModelShape, dtype: torch.dtype, rows: int, tokens: int, context: int
) -> Case:
    cache, batches = _paged(shape, dtype, rows, tokens, context)
    scale, window, heads = shape.head_dim**-0.5, shape.window, shape.num_heads
    qkv = _qkv(shape, dtype, rows * tokens)
    query = qkv[:, :heads]
    out = torch.empty(query.shape, dtype=dtype)
    attended = sum(
        min(position + 1, window or context) for position in batches[0].positions.tolist()
    )
    read = rows * min(context, (window or context) + tokens - 1)
    return Case(
        kernel=name,
        rows=len(qkv),
        native=_in_turn(
            lambda batch: paged_attention(qkv, cache, batch, scale, window, None, None, out),
            batches,
        ),
        by_torch={
            "torch": _in_turn(
                lambda batch: reference.paged_attention(
                    query, cache, batch, scale, window, None, None
                ),
                batches,
            )
        },
        operations=4 * heads * shape.head_dim * attended,
        bytes_moved=2 * read * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        + 2 * out.nbytes,
    )


def _rotate_case(shape: ModelShape, dtype: torch.dtype, rows: int) -> Case:
    cache, batches = _paged(shape, dtype, rows, tokens=1, context=CONTEXT)
    qkv = _qkv(shape, dtype, rows)
    cos, sin = rotation_tables(shape.rope, shape.head_dim, CONTEXT, None)
    return Case(
        kernel="rotate_and_write",
        rows=rows,
        native=_in_turn(lambda batch: rotate_and_write(qkv, cos, sin, cache, batch), batches),
        by_torch={
            "torch": _in_turn(
                lambda batch: reference.rotate_and_write(qkv, cos, sin, cache, batch), batches
            )
        },
        operations=0,
        bytes_moved=2 * qkv.nbytes,
    )


def _qkv(shape: ModelShape, dtype: torch.dtype, tokens: int) -> torch.Tensor:
    heads = shape.num_heads + 2 * shape.num_kv_heads
    return _random(dtype, tokens, heads, shape.head_dim)


def _paged(
    shape: ModelShape, dtype: torch.dtype, rows: int, tokens: int, context: int
) -> tuple[KvCache, list[AttentionBatch]]:
    """A cache, and steps of so many rows, which have their own blocks of it in each. Every row's
    tokens are the last ones of a sequence of `context` positions."""
    size, sizes = EngineConfig.block_size, (shape.num_kv_heads, shape.head_dim)
    blocks = -(-context // size)
    copies = _copies(rows * blocks * bytes_per_block(size, *sizes, dtype))
    cache = new_cache(copies * rows * blocks, size, *sizes, dtype, torch.device("cpu"))
    for memory in (cache.keys, cache.values):
        # Memory that nobody has written is not read from memory.
        memory.copy_(_random(dtype, *memory.shape[1:]))
    positions = torch.arange(context - tokens, context)
    batches = [
        AttentionBatch(
            positions=positions.repeat(rows),
            cache_index=(table[:, positions // size] * size + positions % size).flatten(),
            block_tables=table,
            query_starts=torch.arange(rows + 1) * tokens,
            context_lens=torch.full((rows,), context),
            query_lens=[tokens] * rows,
            context_list=[context] * rows,
        )
        for table in torch.randperm(copies * rows * blocks).view(copies, rows, blocks)
    ]
    return cache, batches


def _product_cases(
    name: str, outs: int, ins: int, dtype: torch.dtype, rows: list[int]
) -> Iterator[Case]:
    """By torch in float32, and in bfloat16 if that is wanted and the CPU multiplies it; both take
    and give numbers of their own kind."""
    weight = _random(dtype, outs, ins)
    packed = [pack(weight) for _ in range(_copies(weight.nbytes))]
    kinds = [torch.float32]
    if dtype == torch.bfloat16 and computes_natively(dtype):
        kinds.append(dtype)
    with _without_native_kernels():
        products = {
            kind: [
                Linear(weight, None, kind) for _ in range(_copies(weight.numel() * kind.itemsize))
            ]
            for kind in kinds
        }
    for count in rows:
        x, out = _random(dtype, count, ins), torch.empty(count, outs, dtype=dtype)
        yield Case(
            kernel=f"linear {name}",
            rows=count,
            native=_in_turn(_native_product(x, out), packed),
            by_torch={
                f"torch {str(kind).removeprefix('torch.')}": _in_turn(
                    _torch_product(x.to(kind), out.to(kind)), products[kind]
                )
                for kind in kinds
            },
            operations=2 * count * outs * ins,
            bytes_moved=weight.nbytes + x.nbytes + out.nbytes,
        )


def _native_product(x: torch.Tensor, out: torch.Tensor) -> Callable[[torch.Tensor], object]:
    multiply = path.native.linear
    sizes = len(x), out.shape[1], x.shape[1], x.dtype == torch.bfloat16
    return lambda packed: multiply(x.data_ptr(), packed.data_ptr(), 0, out.data_ptr(), *sizes)


def _torch_product(x: torch.Tensor, out: torch.Tensor) -> Callable[[Linear], object]:
    return lambda linear: linear(x, out)


def _norm_case(shape: ModelShape, dtype: torch.dtype, rows: int) -> Case:
    """With the residual's addition, as all but a stage's first."""
    x, delta = (_random(dtype, rows, shape.hidden_size) for _ in range(2))
    # It is added over and over.
    delta *= 1e-3
    weight, out = _random(dtype, shape.hidden_size), torch.empty_like(x)
    epsilon = shape.rms_norm_epsilon
    return Case(
        kernel="add_rms_norm",
        rows=rows,
        native=lambda: add_rms_norm(x, delta, weight, epsilon, out),
        by_torch={"torch": lambda: reference.rms_norm(x.add_(delta), weight, epsilon)},
        operations=0,
        bytes_moved=4 * x.nbytes,
    )


def _silu_case(shape: ModelShape, dtype: torch.dtype, rows: int) -> Case:
    x = _random(dtype, rows, 2 * shape.intermediate_size)
    out = torch.empty(rows, shape.intermediate_size, dtype=dtype)
    return Case(
        kernel="silu_and_multiply",
        rows=rows,
        native=lambda: activate_and_multiply(x, "silu", out),
        by_torch={"torch": lambda: reference.activate_and_multiply(x, "silu")},
        operations=0,
        bytes_moved=x.nbytes + out.nbytes,
    )


def _embed_case(table: torch.Tensor, rows: int) -> Case:
    out = torch.empty(rows, table.shape[1], dtype=table.dtype)
    ids = list(torch.randint(len(table), (_MOST_COPIES, rows)))
    return Case(
        kernel="embed",
        rows=rows,
        native=_in_turn(lambda some: embed(some, table, 1.0, out), ids),
        by_torch={"torch": _in_turn(lambda some: reference.embed(some, table, 1.0), ids)},
        operations=0,
        bytes_moved=2 * out.nbytes,
    )


def _choose_case(name: str, sampling: Sampling, logits: torch.Tensor) -> Case:
    rows, vocab_size = logits.shape
    slots = [SlotSampling(Admission(0, [0], [], 0, sampling), vocab_size) for _ in range(rows)]
    choices = np.zeros(rows, dtype=CHOICE)
    choices["row"] = range(rows)
    for setting in ("seed", "temperature", "top_k", "top_p", "min_p"):
        choices[setting] = getattr(slots[0], setting)
    return Case(
        kernel=f"choose {name}",
        rows=rows,
        native=lambda: choose(logits, choices),
        by_torch={"torch": lambda: choose_by_torch(logits, slots)},
        operations=0,
        bytes_moved=logits.nbytes,
    )


def _in_turn(call: Callable[[_T], object], copies: list[_T]) -> Call:
    """The call, with the next of the copies each time."""
    turn = itertools.cycle(copies)
    return lambda: call(next(turn))


def _copies(nbytes: int) -> int:
    return min(_MOST_COPIES, -(-_COPIES_BYTES // nbytes))


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@contextmanager
def _without_native_kernels() -> Iterator[None]:
    own = path.path_name()
    path.use_path(REFERENCE)
    try:
        yield
    finally:
        path.use_path(own)
