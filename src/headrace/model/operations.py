"""What each operation means: by kernels/*.py, one call a kernel, on any device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.kernels import elementwise, experts
from headrace.kernels.attention import paged_attention, rotate_and_write
from headrace.kernels.batch import AttentionBatch
from headrace.kernels.exchange import Exchange
from headrace.kernels.kv_cache import KvCache
from headrace.kernels.quantized_linear import QuantizedLinear
from headrace.model.bind import Weights, rotation_of
from headrace.model.buffers import Buffers
from headrace.protocol import program
from headrace.protocol.program import Operation, Program


@dataclass(frozen=True)
class Bound:
    """A stage's program with all that its operations refer to. dtype: of activations. exchange:
    with the stage's other shards, if there are any."""

    program: Program
    weights: Weights
    caches: list[KvCache]
    dtype: torch.dtype
    device: torch.device
    exchange: Exchange | None


@dataclass(frozen=True)
class Step:
    """What operations work on: ids int64 [T] on the first stage, buffers by place, the batch.

    native: the same for native programs, if there are any.
    """

    ids: torch.Tensor | None
    buffers: list[torch.Tensor]
    batch: AttentionBatch | None
    native: Any


# An operation with its weights, cache and places of buffers, which are looked up once.
Work = Callable[[Step], None]


def work_of(operation: Operation, bound: Bound, buffers: Buffers) -> Work:
    """The operation by kernels/*.py, one call a kernel."""
    weights = bound.weights
    match operation:
        case program.Embed():
            return _embed(operation, weights, buffers)
        case program.Norm():
            return _norm(operation, weights, buffers)
        case program.HeadNorm():
            return _head_norm(operation, weights, buffers)
        case program.Linear():
            return _linear(operation, weights, buffers)
        case program.Rotate():
            return _rotate(operation, bound, buffers)
        case program.Attention():
            return _attention(operation, bound, buffers)
        case program.GatedActivation(activation=activation):
            source, out = buffers.place(operation.source), buffers.place(operation.out)

            def activate(step: Step) -> None:
                elementwise.activate_and_multiply(
                    step.buffers[source], activation, step.buffers[out]
                )

            return activate
        case program.Route(chosen=chosen, normalized=normalized):
            scores = buffers.place(operation.buffer)
            return lambda step: experts.route(step.buffers[scores], chosen, normalized)
        case program.Experts():
            return _experts(operation, weights, buffers)
        case program.Add():
            return _add(operation, buffers)
        case program.Scale(factor=factor):
            scaled = buffers.place(operation.buffer)
            return lambda step: elementwise.scale(step.buffers[scaled], factor)
        case program.SoftCap(cap=cap):
            capped = buffers.place(operation.buffer)
            return lambda step: elementwise.soft_cap(step.buffers[capped], cap)
        case program.AllReduce() | program.Gather() | program.NormAcross():
            return _with_other_shards(operation, bound, buffers)


def _embed(operation: program.Embed, weights: Weights, buffers: Buffers) -> Work:
    table, scale, x = weights.tables[operation.table], operation.scale, buffers.place("x")
    first, vocab = operation.first, operation.vocab
    if isinstance(table, QuantizedLinear):

        def look_up(step: Step) -> None:
            assert step.ids is not None
            table.embed(step.ids, scale, step.buffers[x], first=first, vocab=vocab)

        return look_up

    def work(step: Step) -> None:
        assert step.ids is not None
        elementwise.embed(step.ids, table, scale, step.buffers[x], first=first, vocab=vocab)

    return work


def _norm(operation: program.Norm, weights: Weights, buffers: Buffers) -> Work:
    weight, epsilon = weights.vectors[operation.weight], operation.epsilon
    source, out = buffers.place(operation.source), buffers.place(operation.out)
    once = operation.rounds_once
    if operation.delta is None:

        def work(step: Step) -> None:
            own = step.buffers
            elementwise.rms_norm(own[source], weight, epsilon, own[out], rounds_once=once)

        return work
    delta = buffers.place(operation.delta)

    def adding(step: Step) -> None:
        own = step.buffers
        elementwise.add_rms_norm(
            own[source], own[delta], weight, epsilon, own[out], rounds_once=once
        )

    return adding


def _head_norm(operation: program.HeadNorm, weights: Weights, buffers: Buffers) -> Work:
    weight, epsilon = weights.vectors[operation.weight], operation.epsilon
    place, head_dim = buffers.place(operation.buffer), operation.head_dim
    first = operation.first * head_dim
    end = first + operation.heads * head_dim

    def work(step: Step) -> None:
        heads = step.buffers[place][:, first:end].unflatten(1, (-1, head_dim))
        elementwise.head_norm(heads, weight, epsilon)

    return work


def _linear(operation: program.Linear, weights: Weights, buffers: Buffers) -> Work:
    linear = weights.matrices[operation.weight]
    source, out = buffers.place(operation.source), buffers.place(operation.out)
    views = buffers.views(operation.out)

    def work(step: Step) -> None:
        own = step.buffers
        room = own[out]
        result = linear(own[source], room)
        if result is not room:
            own[out] = result
            if step.native is not None:
                step.native.put(out, result.data_ptr())
            for view, head_dim in views:
                own[view] = result.view(len(result), -1, head_dim)

    return work


def _experts(operation: program.Experts, weights: Weights, buffers: Buffers) -> Work:
    gate_up, down = weights.experts[operation.gate_up], weights.experts[operation.down]
    source, out = buffers.place(operation.source), buffers.place(operation.out)
    routes, activation = buffers.place(operation.weights), operation.activation

    def work(step: Step) -> None:
        own = step.buffers
        experts.experts(own[source], own[routes], gate_up, down, activation, own[out])

    return work


def _add(operation: program.Add, buffers: Buffers) -> Work:
    to, added = buffers.place(operation.to), buffers.place(operation.source)
    if operation.gate is None:

        def work(step: Step) -> None:
            step.buffers[to].add_(step.buffers[added])

        return work
    gate = buffers.place(operation.gate)

    def gated(step: Step) -> None:
        own = step.buffers
        elementwise.gated_add(own[to], own[added], own[gate])

    return gated


def _rotate(operation: program.Rotate, bound: Bound, buffers: Buffers) -> Work:
    cache = bound.caches[operation.cache]
    qkv = buffers.place(operation.qkv, cache.head_dim)
    rotation = rotation_of(bound.program, operation)
    cos, sin = (None, None) if rotation is None else bound.weights.rotations[rotation]

    def work(step: Step) -> None:
        assert step.batch is not None
        rotate_and_write(step.buffers[qkv], cos, sin, cache, step.batch)

    return work


def _attention(operation: program.Attention, bound: Bound, buffers: Buffers) -> Work:
    cache, scale = bound.caches[operation.cache], operation.scale
    qkv = buffers.place(operation.qkv, cache.head_dim)
    out = buffers.place(operation.out, cache.head_dim)
    window, soft_cap = operation.window, operation.soft_cap
    sinks = None if operation.sinks is None else bound.weights.sinks[operation.sinks]

    def work(step: Step) -> None:
        assert step.batch is not None
        own = step.buffers
        paged_attention(own[qkv], cache, step.batch, scale, window, sinks, soft_cap, own[out])

    return work


def _with_other_shards(
    operation: program.AllReduce | program.Gather | program.NormAcross,
    bound: Bound,
    buffers: Buffers,
) -> Work:
    exchange = bound.exchange
    assert exchange is not None
    match operation:
        case program.AllReduce():
            summed = buffers.place(operation.buffer)
            return lambda step: exchange.all_reduce(step.buffers[summed])
        case program.Gather(widths=widths):
            source, out = buffers.place(operation.source), buffers.place(operation.out)
            return lambda step: exchange.gather(step.buffers[source], widths, step.buffers[out])
        case program.NormAcross(whole=whole, counts=counts, epsilon=epsilon):
            weight, place = bound.weights.vectors[operation.weight], buffers.place(operation.buffer)
            first, end = operation.first, operation.first + len(weight)

            def norm(step: Step) -> None:
                rows = step.buffers[place][:, first:end]
                squares = rows.float().pow(2).sum(-1)
                exchange.all_reduce(squares if counts else squares.zero_())
                normed = rows * torch.rsqrt(squares / whole + epsilon)[:, None]
                rows.copy_(weight * normed.to(rows.dtype))

            return norm
