"""Granite 3, the dense ones: a Llama with four multipliers, of the embedding, of scores, of what
each half of a layer adds, and of the logits.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headrace.checkpoint.config_fields import COMMON_FIELDS
from headrace.checkpoint.gguf_metadata import GgufMetadata
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.checkpoint.plausible import check_rates
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
from headrace.protocol.program import Operation, Program, Scale


@dataclass(frozen=True, kw_only=True)
class _Multipliers:
    """logits: what they are divided by. attention: None for 1 / sqrt(width of a head)."""

    embedding: float
    residual: float
    logits: float
    attention: float | None


def _program(
    decoder: Decoder,
    rope: RopeConfig,
    attention_bias: bool,
    mlp_bias: bool,
    by: _Multipliers,
    share: StageShare,
) -> Program:
    options = AttentionOptions(scale=by.attention, biased=attention_bias)

    def layer(at: str, number: int, cache: int, delta: str | None) -> list[Operation]:
        return [
            norm(decoder, f"{at}.input_layernorm", delta=delta),
            qkv_product(decoder, at, biased=attention_bias),
            *attention(decoder, at, cache, rope, options),
            Scale("delta", by.residual),
            norm(decoder, f"{at}.post_attention_layernorm", delta="delta"),
            gate_up_product(decoder, at, biased=mlp_bias),
            *gated_down(decoder, at, biased=mlp_bias),
            Scale("delta", by.residual),
        ]

    by_logits = 1 / by.logits
    return stage_program(decoder, share, layer, embedding_scale=by.embedding, logit_scale=by_logits)


def _checked(path: Path, by: _Multipliers) -> _Multipliers:
    rates = {f"{name} multiplier": value for name, value in vars(by).items() if value is not None}
    check_rates(path, rates)
    return by


def _from_huggingface(config: HuggingFaceConfig) -> Design:
    check_activation(config, "hidden_act", ("silu", "swish"))
    decoder, rope = sizes_from_huggingface(config)
    values = config.values
    by = _Multipliers(
        embedding=values.embedding_multiplier,
        residual=values.residual_multiplier,
        logits=values.logits_scaling,
        attention=values.attention_multiplier,
    )
    biases = bool(values.attention_bias), bool(values.mlp_bias)
    return Design(decoder, partial(_program, decoder, rope, *biases, _checked(config.path, by)))


def _from_gguf(metadata: GgufMetadata) -> Design:
    """Defaults are llama.cpp's, where 0 says the same as nothing."""
    decoder, rope = sizes_from_gguf(metadata)
    # The converter orders queries' and keys' rows for the rotation of neighbours.
    decoder = replace(decoder, paired_heads=True)
    by = _Multipliers(
        embedding=metadata.get("embedding_scale", float, 0.0) or 1.0,
        residual=metadata.get("residual_scale", float, 0.0) or 1.0,
        logits=metadata.get("logit_scale", float),
        attention=metadata.get("attention.scale", float, 0.0) or None,
    )
    # Whichever biases are there are added.
    program = partial(_program, decoder, rope, True, True, _checked(metadata.path, by))
    return Design(decoder, program)


GRANITE = Architecture(
    name="GraniteForCausalLM",
    models=("Granite 3, the dense ones",),
    refused=("activations other than SiLU", "experts (GraniteMoE)"),
    base_name="GraniteModel",
    model_type="granite",
    config_class="GraniteConfig",
    fields=COMMON_FIELDS
    | {
        "attention_bias", "mlp_bias", "embedding_multiplier", "residual_multiplier",
        "logits_scaling", "attention_multiplier",
    },
    from_huggingface=_from_huggingface,
    gguf="granite",
    from_gguf=_from_gguf,
)  # fmt: skip
