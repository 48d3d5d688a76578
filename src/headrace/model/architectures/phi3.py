"""Phi-3, and Phi-4 of 14 billion weights: a Llama whose layers store queries, keys and values as
one weight, and gate and up as another, and whose layers may all have a window. For contexts of
128 k the rotation's frequencies have divisors, other ones for longer sequences (longrope).
"""

from functools import partial

from headrace.checkpoint.config_fields import COMMON_FIELDS
from headrace.checkpoint.gguf_metadata import GgufMetadata
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.checkpoint.plausible import check_sizes
from headrace.model import decoder
from headrace.model.architecture import Architecture, Design
from headrace.model.blocks import (
    AttentionOptions,
    attention,
    gated_down,
    norm,
    product,
    stage_program,
)
from headrace.model.decoder import Decoder
from headrace.protocol.model_config import RopeConfig, StageShare
from headrace.protocol.program import Linear, Operation, Program
from headrace.protocol.stored_tensor import StoredTensor

# Without a tensor for the gate: "up" holds both, the gate first.
GGUF_NAMES = {
    **decoder.GGUF_NAMES,
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}


def _program(
    sizes: Decoder, rope: RopeConfig, window: int | None, stored_factors: bool, share: StageShare
) -> Program:
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    heads_width = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
    short, long = (
        StoredTensor(f"rope_factors_{kind}.weight", (sizes.head_dim // 2,))
        if stored_factors
        else None
        for kind in ("short", "long")
    )
    options = AttentionOptions(window=window, factors=short, long_factors=long)

    def layer(at: str, number: int, cache: int, delta: str | None) -> list[Operation]:
        qkv = product(sizes, [f"{at}.self_attn.qkv_proj"], [heads_width], hidden)
        gate_up = product(sizes, [f"{at}.mlp.gate_up_proj"], [2 * inner], hidden)
        return [
            norm(sizes, f"{at}.input_layernorm", delta=delta),
            Linear("normed", qkv, "qkv", "qkv"),
            *attention(sizes, at, cache, rope, options),
            norm(sizes, f"{at}.post_attention_layernorm", delta="delta"),
            Linear("normed", gate_up, "gate_up", "gate_up"),
            *gated_down(sizes, at),
        ]

    return stage_program(sizes, share, layer)


def _from_huggingface(config: HuggingFaceConfig) -> Design:
    decoder.check_activation(config, "hidden_act", ("silu", "swish"))
    sizes, rope = decoder.sizes_from_huggingface(config)
    # Files say 0, too, for none.
    window = config.values.sliding_window or None
    if window is not None:
        check_sizes(config.path, {"sliding_window": window})
    return Design(sizes, partial(_program, sizes, rope, window, False))


def _from_gguf(metadata: GgufMetadata) -> Design:
    sizes, rope = decoder.sizes_from_gguf(metadata, GGUF_NAMES)
    # llama.cpp reads it and leaves it out; here the layers have it, as in transformers.
    window = metadata.get("attention.sliding_window", int, 0) or None
    if window is not None:
        check_sizes(metadata.path, {"attention.sliding_window": window})
    stored_factors = any(name.startswith("rope_factors_") for name in metadata.file.tensors)
    return Design(sizes, partial(_program, sizes, rope, window, stored_factors))


PHI3 = Architecture(
    name="Phi3ForCausalLM",
    models=("Phi-3", "Phi-4 of 14 billion weights"),
    refused=("activations other than SiLU", "rotating only a part of each head (Phi-4-mini)"),
    base_name="Phi3Model",
    model_type="phi3",
    config_class="Phi3Config",
    # Known, so that other values than 1 are refused as what they are.
    fields=COMMON_FIELDS | {"sliding_window", "partial_rotary_factor"},
    from_huggingface=_from_huggingface,
    gguf="phi3",
    from_gguf=_from_gguf,
)
