"""Qwen 2 and 2.5: a Llama with biases on queries, keys and values, and windows in late layers."""

from collections.abc import Sequence
from functools import partial

from headrace.checkpoint.config_fields import COMMON_FIELDS
from headrace.checkpoint.gguf_metadata import GgufMetadata
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
    sizes_from_gguf,
    sizes_from_huggingface,
)
from headrace.protocol.model_config import RopeConfig, StageShare
from headrace.protocol.program import Operation, Program

WINDOW_FIELDS = frozenset(
    {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
)


def windows(config: HuggingFaceConfig) -> tuple[int | None, int, Sequence[str] | None]:
    """Qwen's window, None for none; the first layer that has it; and which have it instead."""
    # Transformers drops a window that is not used.
    window, first = config.values.sliding_window, config.values.max_window_layers
    if window is not None:
        check_sizes(config.path, {"sliding_window": window})
    return window, first, config.layer_kinds


def window_of(
    layer: int, window: int | None, first: int, kinds: Sequence[str] | None
) -> int | None:
    """Positions that a layer attends to, None for all; window, first and kinds as above."""
    slides = layer >= first if kinds is None else kinds[layer] == "sliding_attention"
    return window if slides else None


def _program(
    decoder: Decoder,
    rope: RopeConfig,
    window: int | None,
    first_window: int,
    kinds: Sequence[str] | None,
    share: StageShare,
) -> Program:
    def layer(at: str, number: int, cache: int, delta: str | None) -> list[Operation]:
        own_window = window_of(number, window, first_window, kinds)
        options = AttentionOptions(window=own_window)
        return [
            norm(decoder, f"{at}.input_layernorm", delta=delta),
            qkv_product(decoder, at, biased=True),
            *attention(decoder, at, cache, rope, options),
            norm(decoder, f"{at}.post_attention_layernorm", delta="delta"),
            gate_up_product(decoder, at),
            *gated_down(decoder, at),
        ]

    return stage_program(decoder, share, layer)


def _from_huggingface(config: HuggingFaceConfig) -> Design:
    check_activation(config, "hidden_act", ("silu", "swish"))
    decoder, rope = sizes_from_huggingface(config)
    return Design(decoder, partial(_program, decoder, rope, *windows(config)))


def _from_gguf(metadata: GgufMetadata) -> Design:
    decoder, rope = sizes_from_gguf(metadata)
    # llama.cpp has no windows for it, and its converter writes none.
    return Design(decoder, partial(_program, decoder, rope, None, 0, None))


QWEN2 = Architecture(
    name="Qwen2ForCausalLM",
    models=("Qwen2", "Qwen2.5"),
    refused=("activations other than SiLU",),
    base_name="Qwen2Model",
    model_type="qwen2",
    config_class="Qwen2Config",
    fields=COMMON_FIELDS | WINDOW_FIELDS,
    from_huggingface=_from_huggingface,
    gguf="qwen2",
    ignored_gguf_keys=frozenset({"attention.sliding_window"}),
    from_gguf=_from_gguf,
)
