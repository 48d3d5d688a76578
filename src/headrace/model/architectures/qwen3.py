"""Qwen 3, the dense ones: norms of each query's and key's head, and heads of a width of their own.

Windows are as in Qwen 2.
"""

from collections.abc import Sequence
from functools import partial

from headrace.checkpoint.config_fields import COMMON_FIELDS
from headrace.checkpoint.gguf_metadata import GgufMetadata
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.model.architecture import Architecture, Design
from headrace.model.architectures.qwen2 import WINDOW_FIELDS, window_of, windows
from headrace.model.blocks import (
    AttentionOptions,
    attention,
    gate_up_product,
    gated_down,
    head_norms,
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


def _program(
    decoder: Decoder,
    rope: RopeConfig,
    biased: bool,
    window: int | None,
    first_window: int,
    kinds: Sequence[str] | None,
    share: StageShare,
) -> Program:
    def layer(at: str, number: int, cache: int, delta: str | None) -> list[Operation]:
        own_window = window_of(number, window, first_window, kinds)
        options = AttentionOptions(window=own_window, biased=biased)
        return [
            norm(decoder, f"{at}.input_layernorm", delta=delta),
            qkv_product(decoder, at, biased=biased),
            *head_norms(decoder, at),
            *attention(decoder, at, cache, rope, options),
            norm(decoder, f"{at}.post_attention_layernorm", delta="delta"),
            gate_up_product(decoder, at),
            *gated_down(decoder, at),
        ]

    return stage_program(decoder, share, layer)


def _from_huggingface(config: HuggingFaceConfig) -> Design:
    check_activation(config, "hidden_act", ("silu", "swish"))
    decoder, rope = sizes_from_huggingface(config)
    biased = bool(config.values.attention_bias)
    return Design(decoder, partial(_program, decoder, rope, biased, *windows(config)))


def _from_gguf(metadata: GgufMetadata) -> Design:
    decoder, rope = sizes_from_gguf(metadata)
    # Whichever biases are there are added; llama.cpp has no windows for it.
    return Design(decoder, partial(_program, decoder, rope, True, None, 0, None))


QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    models=("Qwen3, the dense ones",),
    refused=("activations other than SiLU",),
    base_name="Qwen3Model",
    model_type="qwen3",
    config_class="Qwen3Config",
    fields=COMMON_FIELDS | WINDOW_FIELDS | {"attention_bias"},
    from_huggingface=_from_huggingface,
    gguf="qwen3",
    ignored_gguf_keys=frozenset({"attention.sliding_window"}),
    from_gguf=_from_gguf,
)
