"""What Gemma 2 and 3 share: four norms a layer, soft caps, and layers that have a window.

Norms multiply by 1 + weight; in GGUF files the 1 is in the weight already.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.checkpoint.config_fields import COMMON_FIELDS
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.checkpoint.plausible import check_rates, check_sizes
from headrace.model import blocks, decoder
from headrace.model.architecture import Design
from headrace.model.decoder import Decoder
from headrace.protocol.model_config import RopeConfig, StageShare
from headrace.protocol.program import Operation, Program

GGUF_NAMES = {
    **decoder.GGUF_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ACTIVATIONS = ("gelu_pytorch_tanh", "gelu_tanh")
FIELDS = (COMMON_FIELDS - {"hidden_act"}) | {
    "hidden_activation", "attention_bias", "query_pre_attn_scalar", "sliding_window",
    "layer_types", "final_logit_softcapping",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Gemma:
    """Gemma 2 and 3. scale: of scores. pattern: each so many layers one has full attention, the
    others a window, unless kinds says so of each. ropes: of the one and of the others. biased:
    attention's products. head_norms: of queries and keys."""

    decoder: Decoder
    ropes: tuple[RopeConfig, RopeConfig]
    scale: float
    window: int | None
    pattern: int
    kinds: Sequence[str] | None
    biased: bool
    head_norms: bool
    attention_cap: float | None
    final_cap: float | None


def _program(model: Gemma, share: StageShare) -> Program:
    sizes, biased, offset = model.decoder, model.biased, 0.0 if model.decoder.in_gguf else 1.0
    norm = partial(blocks.norm, sizes, offset=offset)

    def layer(at: str, number: int, cache: int, delta: str | None) -> list[Operation]:
        slides = (number + 1) % model.pattern != 0
        if model.kinds is not None:
            slides = model.kinds[number] == "sliding_attention"
        options = blocks.AttentionOptions(
            scale=model.scale,
            window=model.window if slides else None,
            soft_cap=model.attention_cap,
            biased=biased,
        )
        return [
            norm(f"{at}.input_layernorm", delta=delta),
            blocks.qkv_product(sizes, at, biased=biased),
            *(blocks.head_norms(sizes, at, offset) if model.head_norms else []),
            *blocks.attention(sizes, at, cache, model.ropes[slides], options),
            norm(f"{at}.post_attention_layernorm", "delta", source="delta"),
            norm(f"{at}.pre_feedforward_layernorm", delta="delta"),
            blocks.gate_up_product(sizes, at),
            *blocks.gated_down(sizes, at, "gelu_tanh"),
            norm(f"{at}.post_feedforward_layernorm", "delta", source="delta"),
        ]

    ends = {"embedding_scale": sizes.hidden_size**0.5, "norm_offset": offset}
    return blocks.stage_program(sizes, share, layer, soft_cap=model.final_cap, **ends)


def design(path: Path, model: Gemma) -> Design:
    """The model, if its numbers make sense; raises ModelError."""
    sizes = {"sliding_window": model.window, "sliding_window_pattern": model.pattern}
    check_sizes(path, {name: size for name, size in sizes.items() if size is not None})
    caps = {"attention soft cap": model.attention_cap, "final soft cap": model.final_cap}
    check_rates(path, {name: cap for name, cap in caps.items() if cap is not None})
    return Design(model.decoder, partial(_program, model))


def query_scale(config: HuggingFaceConfig) -> float:
    """What scores are multiplied by, of a directory."""
    scalar = config.values.query_pre_attn_scalar
    check_rates(config.path, {"query_pre_attn_scalar": scalar})
    return float(scalar**-0.5)


def gguf_scale(sizes: Decoder, layers_27b: int) -> float:
    """What scores are multiplied by, which GGUF files do not say: it follows from the heads' width,
    in the largest model, of so many layers, from the hidden one's a head (llama-model.cpp)."""
    by_hidden = sizes.num_layers == layers_27b
    return float((sizes.hidden_size // sizes.num_heads if by_hidden else sizes.head_dim) ** -0.5)
