"""What a program names in the files, loaded, and laid out for the device that runs it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from headrace.checkpoint.gguf_file import GgufFile
from headrace.host.memory import freed_at_once
from headrace.kernels.grouped_linear import GroupedLinear
from headrace.kernels.linear import Linear
from headrace.kernels.quantized_linear import QuantizedLinear
from headrace.model.quantized import packed_parts
from headrace.model.rope import rotation_tables
from headrace.model.stored_form import quantized_kinds, stored_kinds
from headrace.model.weights import TensorSource
from headrace.protocol import program
from headrace.protocol.model_config import RopeConfig
from headrace.protocol.program import Matrix, Program, Vector, of_expert
from headrace.protocol.stored_tensor import StoredTensor

# What a table of rotations depends on: base and stretching, divisors, those for long sequences, and
# the heads' width.
Rotation = tuple[RopeConfig, StoredTensor | None, StoredTensor | None, int]


@dataclass(frozen=True)
class Weights:
    """By what the program calls them; what two operations share is there once.

    tables: the embedding, [vocab, hidden], or where its numbers are quantized the product that has
    them. vectors: of norms, [width], their offset added. sinks: float32 [heads]. rotations: cos and
    sin, float32 [max_model_len, head_dim / 2]. experts: of all experts together.
    """

    tables: dict[StoredTensor, torch.Tensor | QuantizedLinear] = field(default_factory=dict)
    vectors: dict[Vector, torch.Tensor] = field(default_factory=dict)
    matrices: dict[Matrix, Linear | QuantizedLinear] = field(default_factory=dict)
    experts: dict[Matrix, GroupedLinear] = field(default_factory=dict)
    sinks: dict[StoredTensor, torch.Tensor] = field(default_factory=dict)
    rotations: dict[Rotation, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; tables of rotations, which no file holds, are not counted."""
        tables = [t for t in self.tables.values() if isinstance(t, torch.Tensor)]
        tensors = [*tables, *self.vectors.values(), *self.sinks.values()]
        products = sum(p.nbytes for p in self.matrices.values())
        experts = sum(p.nbytes for p in self.experts.values())
        return sum(t.nbytes for t in tensors) + products + experts


@freed_at_once()
def bind(
    share: Program,
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: Callable[[float], None],
    *,
    stored: GgufFile | None = None,
) -> Weights:
    """Load what the program needs and nothing else; calls progress with the fraction done.

    dtype: of activations and weights. stored: the file whose quantized weights stay as they are, as
    far as kernels take them so, which only native ones do; None: all are dequantized. Raises
    ModelError for tensors that are missing or of the wrong shape.
    """
    weights = Weights()
    kinds = {} if stored is None else quantized_kinds(stored)

    def linear(matrix: Matrix) -> Linear | QuantizedLinear:
        own = stored_kinds(matrix, kinds)
        if own is None or stored is None:
            return _linear(matrix, source, dtype, device)
        return QuantizedLinear(
            packed_parts(matrix, own, stored), _bias(matrix, source, dtype), dtype
        )

    operations = [*share.operations, *share.head]
    for number, operation in enumerate(operations):

        def part_done(part: float, number: int = number) -> None:
            progress((number + part) / len(operations))

        match operation:
            case program.Embed(table=table):
                product = Matrix((table,))
                if stored_kinds(product, kinds) is not None:
                    # A head that is tied to it is this product.
                    if product not in weights.matrices:
                        weights.matrices[product] = linear(product)
                    packed = weights.matrices[product]
                    assert isinstance(packed, QuantizedLinear)
                    weights.tables[table] = packed
                elif table not in weights.tables:
                    weights.tables[table] = source.load(table, dtype).to(device)
            case (
                program.Norm(weight=vector)
                | program.HeadNorm(weight=vector)
                | program.NormAcross(weight=vector)
            ):
                if vector not in weights.vectors:
                    loaded = source.load(vector.tensor)
                    if vector.offset:
                        loaded = loaded.float() + vector.offset
                    weights.vectors[vector] = loaded.to(device, dtype)
            case program.Linear(weight=matrix):
                if matrix not in weights.matrices:
                    weights.matrices[matrix] = linear(matrix)
            case program.Experts(gate_up=gate_up, down=down, count=count):
                for half, matrix in enumerate((gate_up, down)):
                    loaded_experts = GroupedLinear(count, matrix.outs, matrix.ins, dtype, device)
                    for expert in range(count):
                        weight = _loaded(of_expert(matrix, expert), source, dtype)
                        loaded_experts.put(expert, *weight)
                        part_done((half + (expert + 1) / count) / 2)
                    weights.experts[matrix] = loaded_experts
            case program.Attention(sinks=StoredTensor() as sinks):
                weights.sinks[sinks] = source.load(sinks).to(device, torch.float32)
        part_done(1)
    for rotation in rotations(share):
        rope, factors, long_factors, head_dim = rotation
        if long_factors is not None and max_model_len > rope.original_max_positions:
            factors = long_factors
        divisors = None
        if factors is not None and (source.has(factors.name) or not factors.optional):
            divisors = source.load(factors).float()
        cos, sin = rotation_tables(rope, head_dim, max_model_len, divisors)
        weights.rotations[rotation] = cos.to(device), sin.to(device)
    return weights


def rotations(share: Program) -> Iterator[Rotation]:
    """Each of the tables that the program needs, once."""
    found = {
        rotation_of(share, operation): None
        for operation in share.operations
        if isinstance(operation, program.Rotate)
    }
    return (rotation for rotation in found if rotation is not None)


def rotation_of(share: Program, operation: program.Rotate) -> Rotation | None:
    """The tables that this operation takes."""
    if operation.rope is None:
        return None
    head_dim = share.caches[operation.cache].head_dim
    return operation.rope, operation.factors, operation.long_factors, head_dim


def _linear(
    matrix: Matrix, source: TensorSource, dtype: torch.dtype, device: torch.device
) -> Linear:
    weight, bias = _loaded(matrix, source, dtype)
    return Linear(weight.to(device), None if bias is None else bias.to(device), dtype)


def _loaded(
    matrix: Matrix, source: TensorSource, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight [outs, ins] and the bias [outs]."""
    parts = [source.load(part, dtype) for part in matrix.parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts), _bias(matrix, source, dtype)


def _bias(matrix: Matrix, source: TensorSource, dtype: torch.dtype) -> torch.Tensor | None:
    if not any(source.has(part.name) or not part.optional for part in matrix.biases):
        return None
    return torch.cat(
        [
            source.load(part, dtype)
            if source.has(part.name) or not part.optional
            else torch.zeros(part.shape, dtype=dtype)
            for part in matrix.biases
        ]
    )
