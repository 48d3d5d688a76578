"""Gemma 2: soft caps of scores and logits, and a window in every other layer; see gemma.py."""

from headrace.checkpoint.gguf_metadata import GgufMetadata
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.model import decoder
from headrace.model.architecture import Architecture, Design
from headrace.model.architectures.gemma import (
    ACTIVATIONS,
    FIELDS,
    GGUF_NAMES,
    Gemma,
    design,
    gguf_scale,
    query_scale,
)


def _from_huggingface(config: HuggingFaceConfig) -> Design:
    decoder.check_activation(config, "hidden_activation", ACTIVATIONS)
    sizes, rope = decoder.sizes_from_huggingface(config)
    values = config.values
    model = Gemma(
        decoder=sizes,
        ropes=(rope, rope),
        scale=query_scale(config),
        window=values.sliding_window,
        pattern=2,
        kinds=config.layer_kinds,
        biased=bool(values.attention_bias),
        head_norms=False,
        attention_cap=values.attn_logit_softcapping,
        final_cap=values.final_logit_softcapping,
    )
    return design(config.path, model)


def _from_gguf(metadata: GgufMetadata) -> Design:
    """Defaults are llama.cpp's."""
    sizes, rope = decoder.sizes_from_gguf(metadata, GGUF_NAMES)
    model = Gemma(
        decoder=sizes,
        ropes=(rope, rope),
        scale=gguf_scale(sizes, 46),
        window=metadata.get("attention.sliding_window", int, 4096),
        pattern=2,
        kinds=None,
        biased=True,
        head_norms=False,
        attention_cap=metadata.get("attn_logit_softcapping", float, 50.0),
        final_cap=metadata.get("final_logit_softcapping", float, 30.0),
    )
    return design(metadata.path, model)


GEMMA2 = Architecture(
    name="Gemma2ForCausalLM",
    models=("Gemma 2",),
    refused=("activations other than GELU's approximation by tanh",),
    base_name="Gemma2Model",
    model_type="gemma2",
    config_class="Gemma2Config",
    fields=FIELDS | {"attn_logit_softcapping"},
    ignored_fields=frozenset({"hidden_act"}),
    from_huggingface=_from_huggingface,
    gguf="gemma2",
    from_gguf=_from_gguf,
)
