"""Pieces of programs that architectures are put together from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.model.decoder import Decoder, stored_name
from headrace.protocol.model_config import RopeConfig, StageShare
from headrace.protocol.program import (
    Add,
    Attention,
    CacheShape,
    Embed,
    GatedActivation,
    HeadNorm,
    Linear,
    Matrix,
    Norm,
    Operation,
    Program,
    Rotate,
    Scale,
    SoftCap,
    Vector,
)
from headrace.protocol.stored_tensor import StoredTensor

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


def norm(
    decoder: Decoder,
    name: str,
    out: str = "normed",
    *,
    source: str = "x",
    delta: str | None = None,
    offset: float = 0.0,
    rounds_once: bool = False,
) -> Norm:
    """RMS norm by a weight of the hidden size. name: Hugging Face's, without its ending."""
    tensor = StoredTensor(f"{stored_name(decoder, name)}.weight", (decoder.hidden_size,))
    epsilon = decoder.rms_norm_epsilon
    return Norm(source, Vector(tensor, offset), epsilon, out, delta, rounds_once)


def product(
    decoder: Decoder,
    names: Sequence[str],
    outs: Sequence[int],
    ins: int,
    *,
    biased: bool = False,
    paired: Sequence[int] | None = None,
) -> Matrix:
    """Weights of these names and outputs as one product.

    biased: biases are added, as far as the files have them. paired: by name, the heads whose rows
    have rotated pairs next to each other.
    """
    parts, biases = [], []
    for number, (name, out) in enumerate(zip(names, outs, strict=True)):
        stored, heads = stored_name(decoder, name), paired[number] if paired else 0
        parts.append(StoredTensor(f"{stored}.weight", (out, ins), heads))
        if biased:
            biases.append(StoredTensor(f"{stored}.bias", (out,), heads, optional=True))
    return Matrix(tuple(parts), tuple(biases))


def qkv_product(decoder: Decoder, at: str, *, biased: bool = False) -> Linear:
    """Queries, keys and values of the normed rows, of a layer that has three weights for them."""
    heads, kv_heads = decoder.num_heads, decoder.num_kv_heads
    names = [f"{at}.self_attn.{part}_proj" for part in "qkv"]
    outs = [count * decoder.head_dim for count in (heads, kv_heads, kv_heads)]
    paired = (heads, kv_heads, 0) if decoder.paired_heads else None
    matrix = product(decoder, names, outs, decoder.hidden_size, biased=biased, paired=paired)
    return Linear("normed", matrix, "qkv", "qkv")


def head_norms(decoder: Decoder, at: str, offset: float = 0.0) -> list[Operation]:
    """Norms of each query's head and each key's, by one weight for all queries, one for all
    keys."""
    heads, kv_heads, head_dim = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
    found: list[Operation] = []
    for part, first, count in (("q", 0, heads), ("k", heads, kv_heads)):
        name = stored_name(decoder, f"{at}.self_attn.{part}_norm")
        weight = Vector(StoredTensor(f"{name}.weight", (head_dim,)), offset)
        epsilon = decoder.rms_norm_epsilon
        found.append(HeadNorm("qkv", first, count, head_dim, weight, epsilon))
    return found


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What differs between layers and families. scale: of scores, None for 1 / sqrt(width of a
    head). window, soft_cap, sinks: as of the operation. factors, long_factors: as of Rotate.
    biased: the output projection adds a bias, if the files have it."""

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: StoredTensor | None = None
    factors: StoredTensor | None = None
    long_factors: StoredTensor | None = None
    biased: bool = False


def attention(
    decoder: Decoder, at: str, cache: int, rope: RopeConfig | None, options: AttentionOptions
) -> list[Operation]:
    """Rotation, attention and its projection, from qkv to delta. rope: None for no rotation."""
    heads, width = decoder.num_heads, decoder.num_heads * decoder.head_dim
    scale = decoder.head_dim**-0.5 if options.scale is None else options.scale
    names = [f"{at}.self_attn.o_proj"]
    matrix = product(decoder, names, [decoder.hidden_size], width, biased=options.biased)
    return [
        Rotate("qkv", heads, rope, cache, options.factors, options.long_factors),
        Attention(
            "qkv", heads, cache, scale, "attended", options.window, options.soft_cap, options.sinks
        ),
        Linear("attended", matrix, "delta", "attention_out"),
    ]


def gate_up_product(decoder: Decoder, at: str, *, biased: bool = False) -> Linear:
    """Gate and up of the normed rows, of a layer that has a weight for each."""
    names = [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"]
    inner, hidden = decoder.intermediate_size, decoder.hidden_size
    matrix = product(decoder, names, [inner, inner], hidden, biased=biased)
    return Linear("normed", matrix, "gate_up", "gate_up")


def gated_down(
    decoder: Decoder, at: str, activation: str = "silu", *, biased: bool = False
) -> list[Operation]:
    """Activation and down projection, from gate_up to delta."""
    names = [f"{at}.mlp.down_proj"]
    hidden, inner = decoder.hidden_size, decoder.intermediate_size
    matrix = product(decoder, names, [hidden], inner, biased=biased)
    return [
        GatedActivation("gate_up", "inner", activation),
        Linear("inner", matrix, "delta", "down"),
    ]


def stage_program(
    decoder: Decoder,
    share: StageShare,
    layer: Callable[[str, int, int, str | None], list[Operation]],
    *,
    embedding_scale: float = 1.0,
    norm_offset: float = 0.0,
    norm_rounds_once: bool = False,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    widths: Mapping[str, int] | None = None,
) -> Program:
    """A stage's share: embedding, layers, and what makes logits of the last activations.

    layer: the operations of one, of the start of its tensors' names ("model.layers.3"), its number,
    its cache's, and the buffer that its first norm adds to x, None for none. They leave what is to
    be added to x in "delta". logit_scale, soft_cap: of the logits, in this order. widths: of
    buffers that are a family's own.
    """
    hidden, vocab, head_dim = decoder.hidden_size, decoder.vocab_size, decoder.head_dim
    operations: list[Operation] = []
    if share.embeds:
        table = StoredTensor(f"{stored_name(decoder, EMBEDDING)}.weight", (vocab, hidden))
        operations.append(Embed(table, embedding_scale))
    for cache in range(share.num_layers):
        number = share.first_layer + cache
        operations += layer(f"model.layers.{number}", number, cache, "delta" if cache else None)
    if share.num_layers:
        operations.append(Add("x", "delta"))
    head: list[Operation] = []
    if share.samples:
        scores = product(decoder, [EMBEDDING if decoder.tied_head else HEAD], [vocab], hidden)
        head = [
            norm(decoder, FINAL_NORM, offset=norm_offset, rounds_once=norm_rounds_once),
            Linear("normed", scores, "logits", "head"),
        ]
        if logit_scale != 1:
            head.append(Scale("logits", logit_scale))
        if soft_cap is not None:
            head.append(SoftCap("logits", soft_cap))
    queries, keys = decoder.num_heads * head_dim, decoder.num_kv_heads * head_dim
    return Program(
        hidden_size=hidden,
        vocab_size=vocab,
        operations=tuple(operations),
        head=tuple(head),
        caches=(CacheShape(decoder.num_kv_heads, head_dim),) * share.num_layers,
        widths={
            "normed": hidden,
            "qkv": queries + 2 * keys,
            "attended": queries,
            "delta": hidden,
            "gate_up": 2 * decoder.intermediate_size,
            "inner": decoder.intermediate_size,
            **(widths or {}),
        },
    )
