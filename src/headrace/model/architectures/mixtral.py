"""Mixtral: a Mistral whose layers have experts. Its GGUF files are a Llama's that count experts."""

from dataclasses import replace
from functools import partial

from headrace.checkpoint.config_fields import COMMON_FIELDS
from headrace.checkpoint.gguf_metadata import GgufMetadata
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.checkpoint.plausible import check_sizes
from headrace.model.architecture import Architecture, Design
from headrace.model.blocks import AttentionOptions, attention, norm, qkv_product, stage_program
from headrace.model.decoder import (
    Decoder,
    check_activation,
    sizes_from_gguf,
    sizes_from_huggingface,
)
from headrace.model.mixture import (
    IGNORED_FIELDS,
    Mixture,
    Names,
    checked,
    experts,
    mixture_from_gguf,
)
from headrace.protocol.model_config import RopeConfig, StageShare
from headrace.protocol.program import Operation, Program

NAMES = Names(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)


def _program(
    decoder: Decoder, rope: RopeConfig, window: int | None, mixture: Mixture, share: StageShare
) -> Program:
    options = AttentionOptions(window=window)

    def layer(at: str, number: int, cache: int, delta: str | None) -> list[Operation]:
        return [
            norm(decoder, f"{at}.input_layernorm", delta=delta),
            qkv_product(decoder, at),
            *attention(decoder, at, cache, rope, options),
            norm(decoder, f"{at}.post_attention_layernorm", delta="delta"),
            *experts(decoder, at, mixture),
        ]

    return stage_program(decoder, share, layer, widths=mixture.widths)


def _from_huggingface(config: HuggingFaceConfig) -> Design:
    check_activation(config, "hidden_act", ("silu", "swish"))
    decoder, rope = sizes_from_huggingface(config)
    values, window = config.values, config.values.sliding_window
    if window is not None:
        check_sizes(config.path, {"sliding_window": window})
    mixture = Mixture(
        count=values.num_local_experts,
        chosen=values.num_experts_per_tok,
        inner=decoder.intermediate_size,
        normalized=True,
        names=NAMES,
    )
    return Design(decoder, partial(_program, decoder, rope, window, checked(config.path, mixture)))


def mixtral_from_gguf(metadata: GgufMetadata) -> Design:
    """A Llama's file that counts experts."""
    mixture = mixture_from_gguf(metadata, normalized=True, names=NAMES)
    decoder, rope = sizes_from_gguf(metadata, NAMES.in_gguf, experts=True)
    # The converter orders queries' and keys' rows for the rotation of neighbours, and forgets the
    # window.
    decoder = replace(decoder, paired_heads=True)
    return Design(decoder, partial(_program, decoder, rope, None, mixture))


MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    models=("Mixtral 8x7B", "Mixtral 8x22B"),
    refused=("activations other than SiLU",),
    base_name="MixtralModel",
    model_type="mixtral",
    config_class="MixtralConfig",
    fields=COMMON_FIELDS | {"sliding_window", "num_local_experts", "num_experts_per_tok"},
    ignored_fields=IGNORED_FIELDS | {"router_jitter_noise"},
    from_huggingface=_from_huggingface,
)
