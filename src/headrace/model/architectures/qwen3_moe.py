"""Qwen 3 with experts; a window is one of all layers."""

from functools import partial

from headrace.checkpoint.gguf_metadata import GgufMetadata
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.checkpoint.plausible import check_sizes
from headrace.model import decoder
from headrace.model.architecture import Architecture, Design
from headrace.model.architectures.qwen_moe import (
    FIELDS,
    dense_layers,
    inner_part,
    mixture_from_config,
)
from headrace.model.blocks import (
    AttentionOptions,
    attention,
    head_norms,
    norm,
    qkv_product,
    stage_program,
)
from headrace.model.decoder import Decoder
from headrace.model.mixture import IGNORED_FIELDS, Mixture, Names, mixture_from_gguf
from headrace.protocol.model_config import RopeConfig, StageShare
from headrace.protocol.program import Operation, Program


def _program(
    sizes: Decoder,
    rope: RopeConfig,
    mixture: Mixture,
    biased: bool,
    window: int | None,
    dense: frozenset[int],
    share: StageShare,
) -> Program:
    options = AttentionOptions(window=window, biased=biased)

    def layer(at: str, number: int, cache: int, delta: str | None) -> list[Operation]:
        return [
            norm(sizes, f"{at}.input_layernorm", delta=delta),
            qkv_product(sizes, at, biased=biased),
            *head_norms(sizes, at),
            *attention(sizes, at, cache, rope, options),
            norm(sizes, f"{at}.post_attention_layernorm", delta="delta"),
            *inner_part(sizes, at, None if number in dense else mixture),
        ]

    return stage_program(sizes, share, layer, widths=mixture.widths)


def _from_huggingface(config: HuggingFaceConfig) -> Design:
    decoder.check_activation(config, "hidden_act", ("silu", "swish"))
    sizes, rope = decoder.sizes_from_huggingface(config)
    # Transformers drops a window that is not used.
    window, biased = config.values.sliding_window, bool(config.values.attention_bias)
    if window is not None:
        check_sizes(config.path, {"sliding_window": window})
    mixture, dense = mixture_from_config(config), dense_layers(config)
    return Design(sizes, partial(_program, sizes, rope, mixture, biased, window, dense))


def _from_gguf(metadata: GgufMetadata) -> Design:
    mixture = mixture_from_gguf(metadata, normalized=True)
    sizes, rope = decoder.sizes_from_gguf(metadata, Names().in_gguf, experts=True)
    # Whichever biases are there are added; llama.cpp has no windows and no dense layers for it.
    return Design(sizes, partial(_program, sizes, rope, mixture, True, None, frozenset()))


QWEN3_MOE = Architecture(
    name="Qwen3MoeForCausalLM",
    models=("Qwen3-30B-A3B", "Qwen3-235B-A22B"),
    refused=("activations other than SiLU",),
    base_name="Qwen3MoeModel",
    model_type="qwen3_moe",
    config_class="Qwen3MoeConfig",
    fields=FIELDS | {"attention_bias"},
    ignored_fields=IGNORED_FIELDS,
    from_huggingface=_from_huggingface,
    gguf="qwen3moe",
    from_gguf=_from_gguf,
)
