"""A stage's program cut for its shards, which compute it together (tensor parallelism).

What a product makes is dealt to the shards, each of which has the rows of the weight that make its
part; the product that takes it has the columns, and makes a part of a sum. So attention's heads,
the inner width of a gated product and of each expert, and the vocabulary are cut. Shards add up
before the sum is used (as in Megatron-LM, arXiv 1909.08053). An architecture knows nothing of it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from msgspec.structs import replace

from headrace.errors import UsageError
from headrace.protocol.program import (
    Add,
    AllReduce,
    Attention,
    CacheShape,
    Embed,
    Experts,
    GatedActivation,
    Gather,
    HeadNorm,
    Linear,
    Matrix,
    Norm,
    NormAcross,
    Operation,
    Program,
    Rotate,
    Route,
    Scale,
    SoftCap,
    Vector,
)
from headrace.protocol.ranks import Range, dealt
from headrace.protocol.stored_tensor import MX_BLOCK, StoredTensor, cut_to

# A shard's own scores, before they are with the others'.
_OWN_LOGITS = "own_logits"


def shard_program(program: Program, shard: int, count: int) -> Program:
    """What a shard of so many runs of a stage's program. Raises UsageError if it cannot be cut."""
    if count == 1:
        return program
    cutter = _Cutter(program, shard, count)
    operations = cutter.cut(program.operations)
    return replace(
        program,
        operations=tuple(operations),
        head=tuple(cutter.cut(program.head)),
        caches=tuple(cutter.caches),
        widths=cutter.widths,
    )


@dataclass(frozen=True)
class Heads:
    """A shard's. queries, keys: which of the layer's. counts: whether its keys are counted where
    all are, and not those of the shard before that has them, too."""

    queries: Range
    keys: Range
    counts: bool


def heads_of(heads: int, kv_heads: int, shard: int, count: int) -> Heads:
    """The heads that a shard of so many has: those of queries with the keys and values that they
    attend to. Shards that are more than the keys' heads have one each, some the same.

    Raises UsageError if there is not a head for each.
    """
    group = heads // kv_heads
    if count <= kv_heads:
        first, end = dealt(kv_heads, shard, count)
        return Heads((first * group, end * group), (first, end), True)
    key = shard * kv_heads // count
    sharing = [other for other in range(count) if other * kv_heads // count == key]
    if len(sharing) > group:
        raise UsageError(
            f"--tensor-parallel-size {count} is too many shards for a layer of {heads} heads, "
            f"of which {group} share a head of keys: each shard needs a head"
        )
    first, end = dealt(group, sharing.index(shard), len(sharing))
    queries = key * group + first, key * group + end
    return Heads(queries, (key, key + 1), shard == sharing[0])


@dataclass
class _Cutter:
    """Cuts operations one after the other.

    ranges: of buffers that are dealt out, what this shard has of their width. partial: buffers of
    which each shard has a part of the sum.
    """

    program: Program
    shard: int
    count: int
    ranges: dict[str, list[Range]] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        shapes = self.program.caches
        self.heads: dict[str, Heads] = {}
        self.caches = list(shapes)
        for operation in self.program.operations:
            if isinstance(operation, Attention):
                shape = shapes[operation.cache]
                own = heads_of(operation.heads, shape.kv_heads, self.shard, self.count)
                self.caches[operation.cache] = CacheShape(_size(own.keys), shape.head_dim)
                self._deal_heads(operation, shape, own)
        for operation in (*self.program.operations, *self.program.head):
            if isinstance(operation, GatedActivation):
                self._deal_inner(operation)
            elif isinstance(operation, Linear) and operation.out == "logits":
                self.ranges[_OWN_LOGITS] = [self._part(operation.weight.outs)]

    @property
    def widths(self) -> dict[str, int]:
        """Of the shard's buffers."""
        dealt_out = {
            name: sum(map(_size, ranges))
            for name, ranges in self.ranges.items()
            if name in self.program.widths or name == _OWN_LOGITS
        }
        return {**self.program.widths, **dealt_out}

    def cut(self, operations: Iterable[Operation]) -> list[Operation]:
        """The operations, with sums where parts of one are needed whole."""
        done: list[Operation] = []
        for operation in operations:
            done += [AllReduce(name) for name in self._needed(operation)]
            done += self._cut(operation)
        return done

    def _needed(self, operation: Operation) -> list[str]:
        """Partial sums that the operation needs whole; they are from then on."""
        read: list[str | None] = []
        match operation:
            case Norm(source=source, delta=delta):
                read = [source, delta]
            case Add(to=to, source=source, gate=gate):
                # Parts of two sums are added part by part.
                read = [gate] if {to, source} <= self.partial else [to, source, gate]
            case Linear(source=source) | GatedActivation(source=source):
                read = [source]
            case Scale(buffer=buffer) | SoftCap(buffer=buffer) | Route(buffer=buffer):
                read = [buffer]
            case Experts(source=source, weights=weights):
                read = [source, weights]
        # Also in another shard's program in this order.
        needed = [name for name in dict.fromkeys(read) if name is not None and name in self.partial]
        self.partial -= set(needed)
        return needed

    def _cut(self, operation: Operation) -> list[Operation]:
        match operation:
            case Embed(table=table):
                rows = self._part(table.shape[0])
                self.partial.add("x")
                return [replace(operation, table=cut_to(table, 0, [rows]), first=rows[0])]
            case Linear():
                return self._cut_linear(operation)
            case HeadNorm():
                return [self._cut_head_norm(operation)]
            case Rotate(qkv=qkv):
                return [replace(operation, heads=_size(self.heads[qkv].queries))]
            case Attention(qkv=qkv, sinks=sinks):
                queries = self.heads[qkv].queries
                own = None if sinks is None else cut_to(sinks, 0, [queries])
                return [replace(operation, heads=_size(queries), sinks=own)]
            case Experts():
                return [self._cut_experts(operation)]
            case Scale(buffer="logits") | SoftCap(buffer="logits") if self.shard:
                return []
        return [operation]

    def _cut_linear(self, operation: Linear) -> list[Operation]:
        weight, out = operation.weight, operation.out
        if (columns := self.ranges.get(operation.source)) is not None:
            self.partial.add(out)
            return [replace(operation, weight=self._columns_of(weight, columns))]
        if out == "logits":
            own = replace(
                operation, weight=_rows_of(weight, self.ranges[_OWN_LOGITS]), out=_OWN_LOGITS
            )
            widths = tuple(_size(self._part(weight.outs, n)) for n in range(self.count))
            return [own, Gather(_OWN_LOGITS, widths, out)]
        if (rows := self.ranges.get(out)) is not None:
            return [replace(operation, weight=_rows_of(weight, rows))]
        return [operation]

    def _columns_of(self, weight: Matrix, ranges: Sequence[Range]) -> Matrix:
        """The bias is added by one of the shards."""
        parts = tuple(cut_to(part, 1, ranges) for part in weight.parts)
        return Matrix(parts, () if self.shard else weight.biases)

    def _cut_experts(self, operation: Experts) -> Experts:
        inner = operation.down.ins
        first, end = self._part(inner)
        self.partial.add(operation.out)
        return replace(
            operation,
            gate_up=_rows_of(operation.gate_up, [(first, end), (inner + first, inner + end)]),
            down=self._columns_of(operation.down, [(first, end)]),
        )

    def _cut_head_norm(self, operation: HeadNorm) -> Operation:
        """Of queries or of keys, which is what begins at the same place."""
        own, of = self.heads[operation.buffer], operation
        shape, heads = self._shapes[operation.buffer]
        are_keys = of.first > 0
        mine = _size(own.queries if not are_keys else own.keys)
        first = _size(own.queries) if are_keys else 0
        if of.head_dim == shape.head_dim and of.heads == (shape.kv_heads if are_keys else heads):
            return replace(of, first=first, heads=mine)
        # All heads together are normed as one.
        assert of.heads == 1
        begin, end = own.keys if are_keys else own.queries
        row = begin * shape.head_dim, end * shape.head_dim
        return NormAcross(
            of.buffer,
            first * shape.head_dim,
            Vector(cut_to(of.weight.tensor, 0, [row]), of.weight.offset),
            of.head_dim,
            own.counts or not are_keys,
            of.epsilon,
        )

    @property
    def _shapes(self) -> dict[str, tuple[CacheShape, int]]:
        """By the buffer of queries, keys and values: its keys' heads, and how many its queries
        have."""
        return {
            operation.qkv: (self.program.caches[operation.cache], operation.heads)
            for operation in self.program.operations
            if isinstance(operation, Attention)
        }

    def _deal_heads(self, operation: Attention, shape: CacheShape, own: Heads) -> None:
        width, heads, kv_heads = shape.head_dim, operation.heads, shape.kv_heads
        first, end = (head * width for head in own.queries)
        ranges = [(first, end)]
        for before in (heads, heads + kv_heads):
            ranges.append(((before + own.keys[0]) * width, (before + own.keys[1]) * width))
        self._deal(operation.qkv, ranges)
        self._deal(operation.out, [(first, end)])
        self.heads[operation.qkv] = own

    def _deal_inner(self, operation: GatedActivation) -> None:
        inner = self.program.widths[operation.out]
        first, end = self._part(inner)
        self._deal(operation.source, [(first, end), (inner + first, inner + end)])
        self._deal(operation.out, [(first, end)])

    def _part(self, width: int, shard: int | None = None) -> Range:
        """Of a width, this shard's or another's: in blocks that quantized weights are stored in,
        if there are enough."""
        if width < self.count:
            raise UsageError(
                f"--tensor-parallel-size {self.count} is too many shards for a model in which a "
                f"width of {width} is dealt to them"
            )
        unit = MX_BLOCK if width >= MX_BLOCK * self.count else 1
        return dealt(width, self.shard if shard is None else shard, self.count, unit)

    def _deal(self, buffer: str, ranges: list[Range]) -> None:
        # A buffer has one width, in all layers.
        assert self.ranges.setdefault(buffer, ranges) == ranges


def _size(part: Range) -> int:
    return part[1] - part[0]


def _rows_of(matrix: Matrix, ranges: Sequence[Range]) -> Matrix:
    """These rows of a product's weight, wherever in its parts they lie."""
    return Matrix(_within(matrix.parts, ranges), _within(matrix.biases, ranges))


def _within(parts: Sequence[StoredTensor], ranges: Sequence[Range]) -> tuple[StoredTensor, ...]:
    bounds = [0]
    for part in parts:
        bounds.append(bounds[-1] + part.shape[0])
    found = []
    for part, (begin, end) in zip(parts, pairwise(bounds), strict=True):
        own = [(max(a, begin) - begin, min(b, end) - begin) for a, b in ranges]
        if kept := [(a, b) for a, b in own if a < b]:
            found.append(cut_to(part, 0, kept))
    return tuple(found)
