"""Qwen 2 with experts, and with one that every row passes, times a gate of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from headrace.checkpoint.gguf_metadata import GgufMetadata
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.checkpoint.plausible import check_sizes
from headrace.model import blocks, decoder
from headrace.model.architecture import Architecture, Design
from headrace.model.architectures.qwen_moe import (
    FIELDS,
    dense_layers,
    inner_part,
    mixture_from_config,
)
from headrace.model.blocks import AttentionOptions, norm, product
from headrace.model.decoder import Decoder
from headrace.model.mixture import IGNORED_FIELDS, Mixture, Names, mixture_from_gguf
from headrace.protocol.model_config import RopeConfig, StageShare
from headrace.protocol.program import Add, GatedActivation, Linear, Operation, Program

GGUF_NAMES = {
    **Names().in_gguf,
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}


@dataclass(frozen=True, kw_only=True)
class _Options:
    """biased: queries, keys and values. window: of layers that kinds says, or else of every second
    one before window_end. dense: layers without experts. shared: width of the expert of all."""

    biased: bool
    window: int | None = None
    window_end: int = 0
    kinds: Sequence[str] | None = None
    dense: frozenset[int] = frozenset()
    shared: int

    def window_of(self, number: int) -> int | None:
        """Positions that a layer attends to, None for all."""
        if self.kinds is None:
            return self.window if number % 2 == 0 and number < self.window_end else None
        return self.window if self.kinds[number] == "sliding_attention" else None


def _shared_expert(sizes: Decoder, at: str, inner: int) -> list[Operation]:
    hidden, name = sizes.hidden_size, f"{at}.mlp.shared_expert"
    gate_up = product(sizes, [f"{name}.gate_proj", f"{name}.up_proj"], [inner, inner], hidden)
    down = product(sizes, [f"{name}.down_proj"], [hidden], inner)
    return [
        Linear("normed", gate_up, "shared_gate_up", "gate_up"),
        GatedActivation("shared_gate_up", "shared_inner", "silu"),
        Linear("shared_inner", down, "shared", "down"),
        Linear("normed", product(sizes, [f"{name}_gate"], [1], hidden), "shared_gate", "router"),
        Add("delta", "shared", "shared_gate"),
    ]


def _program(
    sizes: Decoder, rope: RopeConfig, mixture: Mixture, options: _Options, share: StageShare
) -> Program:
    def layer(at: str, number: int, cache: int, delta: str | None) -> list[Operation]:
        window, dense = options.window_of(number), number in options.dense
        return [
            norm(sizes, f"{at}.input_layernorm", delta=delta),
            blocks.qkv_product(sizes, at, biased=options.biased),
            *blocks.attention(sizes, at, cache, rope, AttentionOptions(window=window)),
            norm(sizes, f"{at}.post_attention_layernorm", delta="delta"),
            *inner_part(sizes, at, None if dense else mixture),
            *([] if dense else _shared_expert(sizes, at, options.shared)),
        ]

    shared, hidden = options.shared, sizes.hidden_size
    widths = {"shared_gate_up": 2 * shared, "shared_inner": shared, "shared": hidden}
    widths |= mixture.widths | {"shared_gate": 1}
    return blocks.stage_program(sizes, share, layer, widths=widths)


def _from_huggingface(config: HuggingFaceConfig) -> Design:
    decoder.check_activation(config, "hidden_act", ("silu", "swish"))
    sizes, rope = decoder.sizes_from_huggingface(config)
    values, shared = config.values, config.values.shared_expert_intermediate_size
    window = values.sliding_window if values.use_sliding_window else None
    said = {"shared_expert_intermediate_size": shared}
    check_sizes(config.path, said if window is None else said | {"sliding_window": window})
    options = _Options(
        biased=bool(values.qkv_bias),
        window=window,
        window_end=values.max_window_layers,
        kinds=config.layer_kinds,
        dense=dense_layers(config),
        shared=shared,
    )
    return Design(sizes, partial(_program, sizes, rope, mixture_from_config(config), options))


def _from_gguf(metadata: GgufMetadata) -> Design:
    """Defaults are llama.cpp's."""
    mixture = mixture_from_gguf(metadata, normalized=False)
    sizes, rope = decoder.sizes_from_gguf(metadata, GGUF_NAMES, experts=True)
    shared = metadata.get("expert_shared_feed_forward_length", int, sizes.intermediate_size)
    check_sizes(metadata.path, {"expert_shared_feed_forward_length": shared})
    options = _Options(biased=True, shared=shared)
    return Design(sizes, partial(_program, sizes, rope, mixture, options))


QWEN2_MOE = Architecture(
    name="Qwen2MoeForCausalLM",
    models=("Qwen1.5-MoE", "Qwen2-57B-A14B"),
    refused=("activations other than SiLU",),
    base_name="Qwen2MoeModel",
    model_type="qwen2_moe",
    config_class="Qwen2MoeConfig",
    fields=FIELDS
    | {"qkv_bias", "shared_expert_intermediate_size", "max_window_layers", "layer_types"},
    ignored_fields=IGNORED_FIELDS,
    from_huggingface=_from_huggingface,
    gguf="qwen2moe",
    from_gguf=_from_gguf,
)
