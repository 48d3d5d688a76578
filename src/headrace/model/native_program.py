"""Runs of operations that have native kernels, each compiled to one native call."""

from collections.abc import Iterable
from typing import Any

import torch

from headrace.kernels import attention, path
from headrace.kernels.batch import AttentionBatch
from headrace.kernels.kv_cache import KvCache
from headrace.kernels.quantized_linear import QuantizedLinear
from headrace.model.bind import rotation_of
from headrace.model.buffers import Buffers
from headrace.model.operations import Bound
from headrace.protocol import program
from headrace.protocol.program import Operation, label


def is_native(operation: Operation, bound: Bound) -> bool:
    """Whether a native kernel computes the operation."""
    match operation:
        case program.Linear(weight=weight):
            return bound.weights.matrices[weight].native
        case program.Experts(gate_up=gate_up, down=down):
            experts = bound.weights.experts
            return experts[gate_up].native and experts[down].native
        case program.Rotate(cache=cache) | program.Attention(cache=cache):
            head_dim = bound.caches[cache].head_dim
            return attention.runs_native(bound.device, bound.dtype, head_dim)
        case program.NormAcross():
            return False
    return path.runs_native(bound.device, bound.dtype)


def compile_run(operations: Iterable[Operation], bound: Bound, buffers: Buffers) -> Any:
    """The native program of operations that are all native; its run() takes a native_step()."""
    compiled = path.native.Program(bfloat16=bound.dtype == torch.bfloat16)
    for operation in operations:
        _add(compiled, operation, bound, buffers)
    return compiled


def native_step(places: list[torch.Tensor], batch: AttentionBatch | None, ids: int) -> Any:
    """What native programs are told of a step. ids: their address, 0 for none."""
    addresses = [tensor.data_ptr() for tensor in places]
    if batch is None:
        return path.native.Step(addresses, len(places[0]))
    return path.native.Step(
        addresses,
        len(places[0]),
        ids,
        batch.positions.data_ptr(),
        batch.cache_index.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.block_tables.shape[1],
        batch.query_starts.data_ptr(),
        batch.context_lens.data_ptr(),
        len(batch.query_lens),
    )


def _add(compiled: Any, operation: Operation, bound: Bound, buffers: Buffers) -> None:
    weights, name = bound.weights, label(operation)
    match operation:
        case program.Embed():
            table = weights.tables[operation.table]
            if isinstance(table, QuantizedLinear):
                (part,) = table.parts
                compiled.embed_quantized(
                    label=name,
                    out=buffers.place("x"),
                    packed=part.packed.data_ptr(),
                    vocab=operation.vocab,
                    width=part.ins,
                    scale=operation.scale,
                    first=operation.first,
                    held=part.outs,
                    form=part.form.native,
                )
                return
            assert table.is_contiguous()
            compiled.embed(
                label=name,
                out=buffers.place("x"),
                table=table.data_ptr(),
                vocab=operation.vocab,
                width=table.shape[1],
                scale=operation.scale,
                first=operation.first,
                held=len(table),
            )
        case program.Norm():
            weight = weights.vectors[operation.weight]
            delta = operation.delta
            compiled.norm(
                label=name,
                source=buffers.place(operation.source),
                delta=-1 if delta is None else buffers.place(delta),
                out=buffers.place(operation.out),
                weight=weight.data_ptr(),
                width=len(weight),
                epsilon=operation.epsilon,
                rounds_once=operation.rounds_once,
            )
        case program.HeadNorm():
            compiled.head_norm(
                label=name,
                buffer=buffers.place(operation.buffer),
                weight=weights.vectors[operation.weight].data_ptr(),
                stride=buffers.widths[operation.buffer],
                first=operation.first,
                heads=operation.heads,
                head_dim=operation.head_dim,
                epsilon=operation.epsilon,
            )
        case program.Linear():
            linear = weights.matrices[operation.weight]
            if isinstance(linear, QuantizedLinear):
                for part, bias, first in linear.products():
                    compiled.quantized(
                        label=name,
                        source=buffers.place(operation.source),
                        out=buffers.place(operation.out),
                        packed=part.packed.data_ptr(),
                        bias=bias,
                        outs=part.outs,
                        ins=part.ins,
                        first=first,
                        stride=linear.out_features,
                        form=part.form.native,
                    )
                return
            packed, bias, outs, ins = linear.addresses()
            compiled.linear(
                label=name,
                source=buffers.place(operation.source),
                out=buffers.place(operation.out),
                packed=packed,
                bias=bias,
                outs=outs,
                ins=ins,
                bfloat16_weights=linear.dtype == torch.bfloat16,
            )
        case program.Rotate():
            rotation = rotation_of(bound.program, operation)
            tables = () if rotation is None else weights.rotations[rotation]
            cos, sin = [table.data_ptr() for table in tables] or (0, 0)
            compiled.rotate(
                label=name,
                qkv=buffers.place(operation.qkv),
                heads=operation.heads,
                cos=cos,
                sin=sin,
                **_cache(bound.caches[operation.cache]),
            )
        case program.Attention():
            sinks = None if operation.sinks is None else weights.sinks[operation.sinks]
            compiled.attention(
                label=name,
                qkv=buffers.place(operation.qkv),
                out=buffers.place(operation.out),
                heads=operation.heads,
                sinks=0 if sinks is None else sinks.data_ptr(),
                window=operation.window or 0,
                scale=operation.scale,
                soft_cap=operation.soft_cap or 0.0,
                **_cache(bound.caches[operation.cache]),
            )
        case program.GatedActivation():
            compiled.gate(
                label=name,
                source=buffers.place(operation.source),
                out=buffers.place(operation.out),
                width=buffers.widths[operation.out],
                activation=operation.activation,
            )
        case program.Route():
            compiled.route(
                label=name,
                buffer=buffers.place(operation.buffer),
                experts=buffers.widths[operation.buffer],
                chosen=operation.chosen,
                normalized=operation.normalized,
            )
        case program.Experts():
            gate_up, gate_up_bias = weights.experts[operation.gate_up].addresses()
            down, down_bias = weights.experts[operation.down].addresses()
            compiled.experts(
                label=name,
                source=buffers.place(operation.source),
                weights=buffers.place(operation.weights),
                out=buffers.place(operation.out),
                gate_up=gate_up,
                gate_up_bias=gate_up_bias,
                down=down,
                down_bias=down_bias,
                experts=operation.count,
                hidden=operation.down.outs,
                inner=operation.down.ins,
                activation=operation.activation,
            )
        case program.AllReduce():
            assert bound.exchange is not None
            compiled.all_reduce(
                label=name,
                buffer=buffers.place(operation.buffer),
                width=buffers.widths[operation.buffer],
                exchange=bound.exchange.native,
            )
        case program.Gather():
            assert bound.exchange is not None
            compiled.gather(
                label=name,
                source=buffers.place(operation.source),
                out=buffers.place(operation.out),
                widths=operation.widths,
                exchange=bound.exchange.native,
            )
        case program.Add(gate=str() as gate):
            compiled.gated_add(
                label=name,
                out=buffers.place(operation.to),
                delta=buffers.place(operation.source),
                gate=buffers.place(gate),
                width=buffers.widths[operation.to],
            )
        case program.Scale():
            compiled.scale(
                label=name,
                buffer=buffers.place(operation.buffer),
                width=buffers.widths[operation.buffer],
                factor=operation.factor,
            )
        case program.Add():
            compiled.add(
                label=name,
                out=buffers.place(operation.to),
                delta=buffers.place(operation.source),
                width=buffers.widths[operation.to],
            )
        case program.SoftCap():
            compiled.soft_cap(
                label=name,
                buffer=buffers.place(operation.buffer),
                width=buffers.widths[operation.buffer],
                cap=operation.cap,
            )


def _cache(cache: KvCache) -> dict[str, int | bool]:
    return {
        "keys": cache.keys.data_ptr(),
        "values": cache.values.data_ptr(),
        "block_size": cache.block_size,
        "block_rows": cache.block_rows,
        "kv_heads": cache.kv_heads,
        "head_dim": cache.head_dim,
        "bfloat16_cache": cache.keys.dtype == torch.bfloat16,
    }
