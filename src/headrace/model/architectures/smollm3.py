"""SmolLM3: a Llama in which every fourth layer has no rotation, and maybe a window."""

from dataclasses import dataclass, replace
from functools import partial

from headrace.checkpoint.config_fields import COMMON_FIELDS
from headrace.checkpoint.gguf_metadata import GgufMetadata
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.checkpoint.plausible import check_sizes
from headrace.errors import ModelError
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


@dataclass(frozen=True, kw_only=True)
class _Layers:
    """How they differ. rotated: whether each is; without it all are, but for each interval's last.
    kinds: which have the window; without it those do that are not rotated."""

    rotated: tuple[bool, ...] | None
    interval: int
    window: int | None
    kinds: tuple[str, ...] | None

    def rotates(self, number: int) -> bool:
        """Whether a layer is rotated."""
        if self.rotated is not None:
            return self.rotated[number]
        return (number + 1) % self.interval != 0

    def window_of(self, number: int) -> int | None:
        """Positions that a layer attends to, None for all."""
        if self.kinds is None:
            return None if self.rotates(number) else self.window
        return self.window if self.kinds[number] == "sliding_attention" else None


def _program(
    decoder: Decoder,
    rope: RopeConfig,
    attention_bias: bool,
    mlp_bias: bool,
    layers: _Layers,
    share: StageShare,
) -> Program:
    def layer(at: str, number: int, cache: int, delta: str | None) -> list[Operation]:
        options = AttentionOptions(window=layers.window_of(number), biased=attention_bias)
        own_rope = rope if layers.rotates(number) else None
        return [
            norm(decoder, f"{at}.input_layernorm", delta=delta),
            qkv_product(decoder, at, biased=attention_bias),
            *attention(decoder, at, cache, own_rope, options),
            norm(decoder, f"{at}.post_attention_layernorm", delta="delta"),
            gate_up_product(decoder, at, biased=mlp_bias),
            *gated_down(decoder, at, biased=mlp_bias),
        ]

    return stage_program(decoder, share, layer)


def _from_huggingface(config: HuggingFaceConfig) -> Design:
    check_activation(config, "hidden_act", ("silu", "swish"))
    decoder, rope = sizes_from_huggingface(config)
    values, rotated = config.values, config.raw.get("no_rope_layers")
    if rotated is not None and len(rotated) < config.num_layers:
        raise ModelError(
            f"model {config.path}: no_rope_layers has {len(rotated)} entries for "
            f"{config.num_layers} layers"
        )
    window = values.sliding_window if values.use_sliding_window else None
    sizes = {"no_rope_layer_interval": values.no_rope_layer_interval, "sliding_window": window}
    check_sizes(config.path, {name: size for name, size in sizes.items() if size is not None})
    layers = _Layers(
        rotated=None if rotated is None else tuple(map(bool, rotated)),
        interval=values.no_rope_layer_interval,
        window=window,
        kinds=None if config.layer_kinds is None else tuple(config.layer_kinds),
    )
    biases = bool(values.attention_bias), bool(values.mlp_bias)
    return Design(decoder, partial(_program, decoder, rope, *biases, layers))


def _from_gguf(metadata: GgufMetadata) -> Design:
    decoder, rope = sizes_from_gguf(metadata)
    # The converter orders queries' and keys' rows for the rotation of neighbours.
    decoder = replace(decoder, paired_heads=True)
    # Files do not say it: llama.cpp has this interval, and no windows.
    layers = _Layers(rotated=None, interval=4, window=None, kinds=None)
    # Whichever biases are there are added.
    return Design(decoder, partial(_program, decoder, rope, True, True, layers))


SMOLLM3 = Architecture(
    name="SmolLM3ForCausalLM",
    models=("SmolLM3",),
    refused=("activations other than SiLU",),
    base_name="SmolLM3Model",
    model_type="smollm3",
    config_class="SmolLM3Config",
    fields=COMMON_FIELDS
    | {
        "attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval",
        "use_sliding_window", "sliding_window", "layer_types",
    },
    from_huggingface=_from_huggingface,
    gguf="smollm3",
    from_gguf=_from_gguf,
)  # fmt: skip
