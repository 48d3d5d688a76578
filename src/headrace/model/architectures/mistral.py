"""Mistral: a Llama whose layers, all or some, attend to a window.

llama.cpp's converter makes a Llama of it and forgets the window; see llama.py for GGUF files.
"""

from functools import partial

from headrace.checkpoint.config_fields import COMMON_FIELDS
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.checkpoint.plausible import check_sizes
from headrace.model.architecture import Architecture, Design
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
    sizes_from_huggingface,
)
from headrace.protocol.model_config import RopeConfig, StageShare
from headrace.protocol.program import Operation, Program


def _program(
    decoder: Decoder,
    rope: RopeConfig,
    window: int | None,
    full_layers: frozenset[int],
    share: StageShare,
) -> Program:
    def layer(at: str, number: int, cache: int, delta: str | None) -> list[Operation]:
        own_window = None if number in full_layers else window
        options = AttentionOptions(window=own_window)
        return [
            norm(decoder, f"{at}.input_layernorm", delta=delta),
            qkv_product(decoder, at),
            *attention(decoder, at, cache, rope, options),
            norm(decoder, f"{at}.post_attention_layernorm", delta="delta"),
            gate_up_product(decoder, at),
            *gated_down(decoder, at),
        ]

    return stage_program(decoder, share, layer)


def _from_huggingface(config: HuggingFaceConfig) -> Design:
    check_activation(config, "hidden_act", ("silu", "swish"))
    decoder, rope = sizes_from_huggingface(config)
    window = config.values.sliding_window
    if window is not None:
        check_sizes(config.path, {"sliding_window": window})
    kinds = config.layer_kinds or []
    full = frozenset(number for number, kind in enumerate(kinds) if kind == "full_attention")
    return Design(decoder, partial(_program, decoder, rope, window, full))


MISTRAL = Architecture(
    name="MistralForCausalLM",
    models=("Mistral 7B", "Ministral"),
    refused=("activations other than SiLU",),
    base_name="MistralModel",
    model_type="mistral",
    config_class="MistralConfig",
    fields=COMMON_FIELDS | {"sliding_window", "layer_types"},
    from_huggingface=_from_huggingface,
)
