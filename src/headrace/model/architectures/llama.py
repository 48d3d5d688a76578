"""Llama 1 to 3 and all that is built like it, SmolLM2 among them.

GGUF files of Mistral and Mixtral models are files of this architecture, too.
"""

from dataclasses import replace
from functools import partial

from headrace.checkpoint.config_fields import COMMON_FIELDS
from headrace.checkpoint.gguf_metadata import GgufMetadata
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.model.architecture import Architecture, Design
from headrace.model.architectures.mixtral import mixtral_from_gguf
from headrace.model.blocks import (
    AttentionOptions,
    attention,
    gate_up_product,
    gated_down,
    norm,
    qkv_product,
    stage_program,
)
from headrace.model.decoder import (
    Decoder,
    check_activation,
    sizes_from_gguf,
    sizes_from_huggingface,
)
from headrace.protocol.model_config import RopeConfig, StageShare
from headrace.protocol.program import Operation, Program
from headrace.protocol.stored_tensor import StoredTensor


def _program(
    decoder: Decoder,
    rope: RopeConfig,
    attention_bias: bool,
    mlp_bias: bool,
    share: StageShare,
) -> Program:
    factors = None
    if decoder.in_gguf:
        # Llama 3's stretching, which the converter has worked out.
        factors = StoredTensor("rope_freqs.weight", (decoder.head_dim // 2,), optional=True)

    options = AttentionOptions(factors=factors, biased=attention_bias)

    def layer(at: str, number: int, cache: int, delta: str | None) -> list[Operation]:
        return [
            norm(decoder, f"{at}.input_layernorm", delta=delta),
            qkv_product(decoder, at, biased=attention_bias),
            *attention(decoder, at, cache, rope, options),
            norm(decoder, f"{at}.post_attention_layernorm", delta="delta"),
            gate_up_product(decoder, at, biased=mlp_bias),
            *gated_down(decoder, at, biased=mlp_bias),
        ]

    return stage_program(decoder, share, layer)


def _from_huggingface(config: HuggingFaceConfig) -> Design:
    check_activation(config, "hidden_act", ("silu", "swish"))
    decoder, rope = sizes_from_huggingface(config)
    biases = bool(config.values.attention_bias), bool(config.values.mlp_bias)
    return Design(decoder, partial(_program, decoder, rope, *biases))


def _from_gguf(metadata: GgufMetadata) -> Design:
    if metadata.get("expert_count", int, 0):
        return mixtral_from_gguf(metadata)
    decoder, rope = sizes_from_gguf(metadata)
    # The converter orders queries' and keys' rows for the rotation of neighbours.
    decoder = replace(decoder, paired_heads=True)
    # Whichever biases are there are added.
    return Design(decoder, partial(_program, decoder, rope, True, True))


LLAMA = Architecture(
    name="LlamaForCausalLM",
    models=("Llama 2 and 3", "SmolLM2", "Yi"),
    refused=("activations other than SiLU", "rotating only a part of each head"),
    base_name="LlamaModel",
    model_type="llama",
    config_class="LlamaConfig",
    fields=COMMON_FIELDS | {"attention_bias", "mlp_bias"},
    ignored_fields=frozenset({"sliding_window"}),
    from_huggingface=_from_huggingface,
    gguf="llama",
    ignored_gguf_keys=frozenset({"attention.sliding_window"}),
    from_gguf=_from_gguf,
)
