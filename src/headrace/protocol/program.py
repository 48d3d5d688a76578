"""A stage's share of a model as a program: typed operations over named buffers and weights.

An architecture builds it (model/architectures/), without torch and without reading a weight; it
travels to the stage, which binds the weights it names and runs it (model/interpreter.py is its
meaning, on any device). Nobody else knows what kind of model it is.

Buffers are named, [T, width], T the step's tokens; widths says how wide each is. The program reads
"x", the activations [T, hidden] (on the first stage Embed makes them), and leaves them there.
Caches are numbered from 0 within the share.
"""

import msgspec

from headrace.protocol.model_config import RopeConfig
from headrace.protocol.stored_tensor import StoredTensor


class Matrix(msgspec.Struct, frozen=True, array_like=True):
    """A product's weight [outs, ins]: tensors stacked along the outputs, and as many biases or
    none. A bias is zeros where its tensor is optional and missing; all missing: none is added."""

    parts: tuple[StoredTensor, ...]
    biases: tuple[StoredTensor, ...] = ()

    @property
    def outs(self) -> int:
        """Outputs of all parts."""
        return sum(part.shape[0] for part in self.parts)

    @property
    def ins(self) -> int:
        """Inputs."""
        return self.parts[0].shape[1]


class Vector(msgspec.Struct, frozen=True, array_like=True):
    """A norm's weight; offset is added to what the files say (Gemma's 1 + w)."""

    tensor: StoredTensor
    offset: float = 0.0


class Embed(msgspec.Struct, tag="embed", frozen=True):
    """x = rows of the table [vocab, hidden] at the input ids, times scale.

    first: the id of the table's first row, where a shard has a part of them: zeros for ids of other
    parts.
    """

    table: StoredTensor
    scale: float = 1.0
    first: int = 0

    @property
    def vocab(self) -> int:
        """How many ids there are."""
        return (self.table.shape if self.table.cut is None else self.table.cut.whole)[0]


class Norm(msgspec.Struct, tag="norm", frozen=True):
    """out = source / rms(source) * weight, by rows; with delta, source += delta first, in place.

    The plain sum is rounded to the activations' type, as between two layers. out may be source.
    rounds_once: the quotient is not rounded to it before the weight multiplies it (GPT-OSS).
    """

    source: str
    weight: Vector
    epsilon: float
    out: str
    delta: str | None = None
    rounds_once: bool = False


class HeadNorm(msgspec.Struct, tag="head_norm", frozen=True):
    """The norm of each of `heads` heads of width head_dim in the buffer, from head `first` on, in
    place (Qwen 3's and Gemma 3's of queries and keys). weight: [head_dim], one for all of them."""

    buffer: str
    first: int
    heads: int
    head_dim: int
    weight: Vector
    epsilon: float


class Linear(msgspec.Struct, tag="linear", frozen=True):
    """out = source W^T + b. label: what a profile calls it."""

    source: str
    weight: Matrix
    out: str
    label: str


class Rotate(msgspec.Struct, tag="rotate", frozen=True):
    """Rotary embedding of queries (in place) and keys of qkv [T, (heads + 2 kv_heads) * head_dim];
    rotated keys, and values, go to the cache. rope: None leaves them as they are. factors: a tensor
    float32 [head_dim / 2] that divides the frequencies, if the files have it. long_factors: the
    same where sequences may be longer than the rotation's original context."""

    qkv: str
    heads: int
    rope: RopeConfig | None
    cache: int
    factors: StoredTensor | None = None
    long_factors: StoredTensor | None = None


class Attention(msgspec.Struct, tag="attention", frozen=True):
    """out [T, heads * head_dim]: causal attention of qkv's queries over the cache.

    window: positions a token attends to, its own included; None for all. soft_cap: scores become
    soft_cap * tanh(score / soft_cap) after scaling; None leaves them. sinks: float32 [heads], a
    score of each head that takes part in its softmax without a value.
    """

    qkv: str
    heads: int
    cache: int
    scale: float
    out: str
    window: int | None = None
    soft_cap: float | None = None
    sinks: StoredTensor | None = None


class GatedActivation(msgspec.Struct, tag="gated_activation", frozen=True):
    """out [T, width] = activation(gate) * up of source [T, 2 width], gate first.

    activation: silu, gelu_tanh (the tanh approximation), or clamped_swiglu, GPT-OSS's: with the
    gate at most 7 and up within 7 of 0, gate * sigmoid(1.702 gate) * (up + 1).
    """

    source: str
    out: str
    activation: str


class Route(msgspec.Struct, tag="route", frozen=True):
    """The buffer [T, experts] of a router's scores becomes each expert's weight for the row.

    Only the `chosen` highest scores have one, of equal scores the first; the others' are 0.
    normalized: a softmax over the chosen alone, else over all of them.
    """

    buffer: str
    chosen: int
    normalized: bool


class Experts(msgspec.Struct, tag="experts", frozen=True):
    """out [T, hidden] = each row's sum, over the experts whose weight for it is not 0, of that
    weight times down W^T of activation(gate) * up, gate and up of source, gate first.

    weights: the buffer [T, count], with at most `chosen` of a row's not 0. gate_up [2 inner,
    hidden], down [hidden, inner]: of each of `count` experts, see of_expert().
    """

    source: str
    weights: str
    count: int
    chosen: int
    gate_up: Matrix
    down: Matrix
    activation: str
    out: str


class Add(msgspec.Struct, tag="add", frozen=True):
    """to += source; with gate [T, 1], to += sigmoid(gate) * source."""

    to: str
    source: str
    gate: str | None = None


class Scale(msgspec.Struct, tag="scale", frozen=True):
    """buffer *= factor."""

    buffer: str
    factor: float


class SoftCap(msgspec.Struct, tag="soft_cap", frozen=True):
    """buffer = cap * tanh(buffer / cap), in place."""

    buffer: str
    cap: float


class AllReduce(msgspec.Struct, tag="all_reduce", frozen=True):
    """buffer = the sum of what the stage's shards have in it, in their order: the same bits for
    each."""

    buffer: str


class Gather(msgspec.Struct, tag="gather", frozen=True):
    """out [T, sum of widths] = what the stage's shards have in source, side by side, on the first
    shard; on the others it is untouched. widths: of the shards' sources."""

    source: str
    widths: tuple[int, ...]
    out: str


class NormAcross(msgspec.Struct, tag="norm_across", frozen=True):
    """A norm of parts of a row that the stage's shards hold together, in place (OLMoE's).

    first: where this shard's part begins in the buffer. weight: [width of it]. whole: width of all
    parts. counts: whether the part's squares are added, which one of several equal parts' are.
    """

    buffer: str
    first: int
    weight: Vector
    whole: int
    counts: bool
    epsilon: float


Operation = (
    Embed | Norm | HeadNorm | Linear | Rotate | Attention | GatedActivation | Route | Experts | Add
    | Scale | SoftCap | AllReduce | Gather | NormAcross
)  # fmt: skip


def of_expert(matrix: Matrix, expert: int) -> Matrix:
    """The matrix of one expert, of those that an Experts operation names."""
    return Matrix(
        tuple(part.of_expert(expert) for part in matrix.parts),
        tuple(bias.of_expert(expert) for bias in matrix.biases),
    )


def label(operation: Operation) -> str:
    """What a profile calls the operation."""
    match operation:
        case Linear():
            return operation.label
        case GatedActivation():
            return operation.activation
        case Add() | Scale():
            # The residual's, which elsewhere is part of a norm.
            return "norm"
    return str(operation.__struct_config__.tag)


class CacheShape(msgspec.Struct, frozen=True, array_like=True):
    """What a layer keeps of each position: keys and values [kv_heads, head_dim]."""

    kv_heads: int
    head_dim: int


class Program(msgspec.Struct, frozen=True):
    """A stage's share. head: from the rows of x that sample to "logits" [rows, vocab], on the last
    stage; empty elsewhere, and its buffers are apart from those of `operations`.

    widths: of every buffer but x and logits, by name.
    """

    hidden_size: int
    vocab_size: int
    operations: tuple[Operation, ...]
    head: tuple[Operation, ...]
    caches: tuple[CacheShape, ...]
    widths: dict[str, int]
