"""Gemma 3, its language models: Gemma 2 with norms of heads in place of the attention's soft cap,
and with a rotation of their own for layers that have a window.
"""

from headrace.checkpoint.gguf_metadata import GgufMetadata
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.checkpoint.rope_parameters import rope_from_gguf, rope_from_huggingface
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
from headrace.protocol.model_config import RopeConfig


def _from_huggingface(config: HuggingFaceConfig) -> Design:
    decoder.check_activation(config, "hidden_activation", ACTIVATIONS)
    # Unlike others, the context that the files give is the one after stretching.
    values, sizes = config.values, decoder.decoder_from_huggingface(config)
    ropes = values.rope_parameters
    full, sliding = (
        rope_from_huggingface(config.path, ropes[kind], sizes.max_positions)
        for kind in ("full_attention", "sliding_attention")
    )
    model = Gemma(
        decoder=sizes,
        ropes=(full, sliding),
        scale=query_scale(config),
        window=values.sliding_window,
        pattern=config.raw.get("sliding_window_pattern", 6),
        kinds=config.layer_kinds,
        biased=bool(values.attention_bias),
        head_norms=True,
        # Transformers reads one, and does not use it.
        attention_cap=None,
        final_cap=values.final_logit_softcapping,
    )
    return design(config.path, model)


def _from_gguf(metadata: GgufMetadata) -> Design:
    """Defaults are llama.cpp's."""
    sizes = decoder.decoder_from_gguf(metadata, GGUF_NAMES)
    window = metadata.get("attention.sliding_window", int, 0) or None
    sliding = RopeConfig(theta=metadata.get("rope.freq_base_swa", float, 10000.0))
    pattern = metadata.get("attention.sliding_window_pattern", int, 6)
    model = Gemma(
        decoder=sizes,
        ropes=(rope_from_gguf(metadata), sliding),
        scale=gguf_scale(sizes, 62),
        window=window,
        # Without a window all layers are alike.
        pattern=1 if window is None else pattern,
        kinds=None,
        biased=True,
        head_norms=True,
        attention_cap=None,
        final_cap=metadata.get("final_logit_softcapping", float, 0.0) or None,
    )
    return design(metadata.path, model)


GEMMA3 = Architecture(
    name="Gemma3ForCausalLM",
    models=("Gemma 3, text alone",),
    refused=("activations other than GELU's approximation by tanh", "images"),
    base_name="Gemma3TextModel",
    model_type="gemma3_text",
    config_class="Gemma3TextConfig",
    fields=FIELDS | {"rope_local_base_freq", "sliding_window_pattern"},
    # Transformers leaves the second there, and does not read it.
    ignored_fields=frozenset({"hidden_act", "_sliding_window_pattern"}),
    from_huggingface=_from_huggingface,
    gguf="gemma3",
    from_gguf=_from_gguf,
)
