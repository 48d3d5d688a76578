"""What decoder-only transformers have in common: their sizes, and how files give them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.checkpoint.gguf_metadata import GgufMetadata
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.checkpoint.plausible import check_rates, check_sizes
from headrace.checkpoint.rope_parameters import rope_from_gguf, rope_from_huggingface
from headrace.errors import ModelError
from headrace.protocol.model_config import RopeConfig

# Names inside a layer, Hugging Face's to GGUF's, of families that do not say otherwise
# (https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py).
GGUF_NAMES: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes of a model, and what its tensors are called.

    max_positions: the longest context it was made for. tied_head: the embedding is the output
    projection, too. gguf_names: names inside a layer, Hugging Face's to GGUF's; None where the
    files have Hugging Face's. paired_heads: rows of queries and keys have rotated pairs next to
    each other, as llama.cpp's converter leaves them for a Llama.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_epsilon: float
    max_positions: int
    tied_head: bool
    gguf_names: Mapping[str, str] | None = None
    paired_heads: bool = False

    @property
    def in_gguf(self) -> bool:
        """Whether the tensors are those of a GGUF file."""
        return self.gguf_names is not None


def stored_name(decoder: Decoder, name: str) -> str:
    """A tensor's name in the files, without its ending, from Hugging Face's.

    model.layers.3.mlp.up_proj becomes blk.3.ffn_up in a GGUF file.
    """
    if decoder.gguf_names is None:
        return name
    if name in _GGUF_TOP_NAMES:
        return _GGUF_TOP_NAMES[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{decoder.gguf_names[part]}"


def decoder_from_huggingface(config: HuggingFaceConfig) -> Decoder:
    """The sizes of a model directory; ModelError if they make no sense by themselves."""
    values = config.values
    heads = values.num_attention_heads
    check_sizes(config.path, {"num_heads": heads, "hidden_size": values.hidden_size})
    decoder = Decoder(
        vocab_size=values.vocab_size,
        hidden_size=values.hidden_size,
        intermediate_size=values.intermediate_size,
        num_layers=config.num_layers,
        num_heads=heads,
        num_kv_heads=values.num_key_value_heads,
        head_dim=getattr(values, "head_dim", None) or values.hidden_size // heads,
        rms_norm_epsilon=values.rms_norm_eps,
        max_positions=values.max_position_embeddings,
        # One of its own counts, if it is there.
        tied_head=bool(values.tie_word_embeddings) and "lm_head.weight" not in config.tensors,
    )
    _check(config, decoder)
    return decoder


def decoder_from_gguf(
    metadata: GgufMetadata, names: Mapping[str, str] = GGUF_NAMES, *, experts: bool = False
) -> Decoder:
    """The sizes of a GGUF file. names: of tensors inside a layer. experts: whether the family has
    them. Raises ModelError for what is missing, makes no sense, or is supported by no family."""
    path, get = metadata.path, metadata.get
    if get("expert_count", int, 0) > 0 and not experts:
        raise ModelError(
            f"model {path}: experts are not supported in a model of the kind "
            f"{metadata.architecture}"
        )
    if not get("attention.causal", bool, True):
        raise ModelError(f"model {path}: it generates no text (attention.causal is off)")
    hidden, heads = get("embedding_length", int), get("attention.head_count", int)
    if heads < 1:
        raise ModelError(f"model {path}: {metadata.architecture}.attention.head_count is {heads}")
    embedding = metadata.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"model {path}: tensor token_embd.weight is missing")
    head_dim = get("attention.key_length", int, hidden // heads)
    if get("attention.value_length", int, head_dim) != head_dim:
        raise ModelError(f"model {path}: values shorter than keys are not supported")
    if get("rope.dimension_count", int, head_dim) != head_dim:
        raise ModelError(f"model {path}: rotating only part of each head is not supported")
    decoder = Decoder(
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length", int),
        num_layers=get("block_count", int),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", int, heads),
        head_dim=head_dim,
        rms_norm_epsilon=get("attention.layer_norm_rms_epsilon", float),
        max_positions=get("context_length", int),
        tied_head="output.weight" not in metadata.file.tensors,
        gguf_names=names,
    )
    _check(metadata, decoder)
    return decoder


def rope_of(config: HuggingFaceConfig) -> RopeConfig:
    """The rotation of all layers of a model directory."""
    values = config.values
    return rope_from_huggingface(
        config.path, values.rope_parameters, values.max_position_embeddings
    )


def sizes_from_huggingface(config: HuggingFaceConfig) -> tuple[Decoder, RopeConfig]:
    """Sizes of a model directory, and the rotation of all its layers."""
    rope, decoder = rope_of(config), decoder_from_huggingface(config)
    for factors in (rope.short_factors, rope.long_factors):
        if factors and len(factors) != decoder.head_dim // 2:
            raise ModelError(
                f"model {config.path}: longrope has {len(factors)} factors, heads of "
                f"{decoder.head_dim} need {decoder.head_dim // 2}"
            )
    return _with_linear_context(decoder, rope), rope


def sizes_from_gguf(
    metadata: GgufMetadata, names: Mapping[str, str] = GGUF_NAMES, *, experts: bool = False
) -> tuple[Decoder, RopeConfig]:
    """Sizes of a GGUF file, and the rotation of all its layers. names, experts: as above."""
    rope, decoder = rope_from_gguf(metadata), decoder_from_gguf(metadata, names, experts=experts)
    if metadata.get("rope.scaling.original_context_length", int, 0):
        return decoder, rope
    return _with_linear_context(decoder, rope), rope


def _with_linear_context(decoder: Decoder, rope: RopeConfig) -> Decoder:
    """The decoder with the context that linear scaling stretches.

    What files give is the length before it there, while the other kinds give the length after.
    """
    if rope.kind != "linear":
        return decoder
    return replace(decoder, max_positions=int(decoder.max_positions * rope.factor))


def check_activation(config: HuggingFaceConfig, name: str, known: tuple[str, ...]) -> None:
    """Raises ModelError unless the field of this name holds one of the known activations."""
    activation = getattr(config.values, name)
    if activation not in known:
        raise ModelError(
            f"model {config.path}: activation {str(activation)[:50]} is not supported, only "
            f"{known[0]}"
        )


def _check(files: HuggingFaceConfig | GgufMetadata, decoder: Decoder) -> None:
    path = files.path
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
        "num_kv_heads", "head_dim", "max_positions",
    )  # fmt: skip
    check_sizes(path, {name: getattr(decoder, name) for name in names})
    check_rates(path, {"rms_norm_epsilon": decoder.rms_norm_epsilon})
    if decoder.num_heads % decoder.num_kv_heads:
        raise ModelError(
            f"model {path}: {decoder.num_heads} attention heads cannot share "
            f"{decoder.num_kv_heads} key-value heads evenly"
        )
    if decoder.head_dim % 2:
        raise ModelError(f"model {path}: head_dim {decoder.head_dim} is odd, rotation needs pairs")
