"""GPT-OSS: experts with biases and an activation of their own, a sink in each head's softmax, and a
window in every other layer. Norms multiply by their weight before they round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from headrace.checkpoint.config_fields import COMMON_FIELDS
from headrace.checkpoint.gguf_metadata import GgufMetadata
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.checkpoint.plausible import check_sizes
from headrace.errors import ModelError
from headrace.model import blocks, decoder
from headrace.model.architecture import Architecture, Design
from headrace.model.architectures.gpt_oss_experts import NAMES, experts
from headrace.model.decoder import Decoder, stored_name
from headrace.model.mixture import IGNORED_FIELDS, Mixture, checked, mixture_from_gguf
from headrace.protocol.model_config import RopeConfig, StageShare
from headrace.protocol.program import Operation, Program
from headrace.protocol.stored_tensor import StoredTensor

GGUF_NAMES = {
    **NAMES.in_gguf,
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks",
}
# What the activation is written for (protocol/program.py).
_ALPHA, _LIMIT = 1.702, 7.0


@dataclass(frozen=True, kw_only=True)
class _Options:
    """biased: attention's products. window: of the layers that kinds says, or else of even ones.
    mxfp4: a directory holds the experts' weights so."""

    biased: bool
    window: int | None
    kinds: Sequence[str] | None
    mxfp4: bool

    def window_of(self, number: int) -> int | None:
        """Positions that a layer attends to, None for all."""
        kind = "sliding_attention" if number % 2 == 0 else "full_attention"
        kind = kind if self.kinds is None else self.kinds[number]
        return self.window if kind == "sliding_attention" else None


def _program(
    sizes: Decoder, rope: RopeConfig, mixture: Mixture, options: _Options, share: StageShare
) -> Program:
    norm = partial(blocks.norm, sizes, rounds_once=True)

    def layer(at: str, number: int, cache: int, delta: str | None) -> list[Operation]:
        sinks = stored_name(sizes, f"{at}.self_attn.sinks") + ".weight" * sizes.in_gguf
        attention = blocks.AttentionOptions(
            window=options.window_of(number),
            sinks=StoredTensor(sinks, (sizes.num_heads,)),
            biased=options.biased,
        )
        return [
            norm(f"{at}.input_layernorm", delta=delta),
            blocks.qkv_product(sizes, at, biased=options.biased),
            *blocks.attention(sizes, at, cache, rope, attention),
            norm(f"{at}.post_attention_layernorm", delta="delta"),
            *experts(sizes, at, mixture, options.mxfp4),
        ]

    widths = mixture.widths
    return blocks.stage_program(sizes, share, layer, norm_rounds_once=True, widths=widths)


def _from_huggingface(config: HuggingFaceConfig) -> Design:
    sizes, rope = decoder.sizes_from_huggingface(config)
    values, window = config.values, config.values.sliding_window
    if (values.swiglu_alpha, values.swiglu_limit) != (_ALPHA, _LIMIT):
        raise ModelError(
            f"model {config.path}: an activation with swiglu_alpha {values.swiglu_alpha} and "
            f"swiglu_limit {values.swiglu_limit} is not supported, only with {_ALPHA} and {_LIMIT}"
        )
    if window is not None:
        check_sizes(config.path, {"sliding_window": window})
    mixture = Mixture(
        count=values.num_local_experts,
        chosen=values.num_experts_per_tok,
        inner=sizes.intermediate_size,
        normalized=True,
    )
    options = _Options(
        biased=bool(values.attention_bias),
        window=window,
        kinds=config.layer_kinds,
        mxfp4=any(name.endswith(".gate_up_proj_blocks") for name in config.tensors),
    )
    mixture = checked(config.path, mixture)
    return Design(sizes, partial(_program, sizes, rope, mixture, options))


def _from_gguf(metadata: GgufMetadata) -> Design:
    """The model's own rotation: llama.cpp rounds YaRN's bounds, as no file says otherwise."""
    mixture = mixture_from_gguf(metadata, normalized=True, names=NAMES)
    sizes, rope = decoder.sizes_from_gguf(metadata, GGUF_NAMES, experts=True)
    window = metadata.get("attention.sliding_window", int)
    check_sizes(metadata.path, {"attention.sliding_window": window})
    options = _Options(biased=True, window=window, kinds=None, mxfp4=False)
    own_rope = replace(rope, truncate=False)
    return Design(sizes, partial(_program, sizes, own_rope, mixture, options))


GPT_OSS = Architecture(
    name="GptOssForCausalLM",
    models=("gpt-oss-20b", "gpt-oss-120b"),
    refused=("activations other than swiglu_alpha 1.702 and swiglu_limit 7",),
    base_name="GptOssModel",
    model_type="gpt_oss",
    config_class="GptOssConfig",
    fields=COMMON_FIELDS - {"hidden_act"}
    | {
        "attention_bias", "sliding_window", "layer_types", "num_local_experts",
        "num_experts_per_tok", "swiglu_alpha", "swiglu_limit",
    },
    # Older names of what other fields say, and one that transformers does not look at.
    ignored_fields=IGNORED_FIELDS
    | {"experts_per_token", "initial_context_length", "hidden_act"},
    from_huggingface=_from_huggingface,
    mxfp4=True,
    gguf="gpt-oss",
    from_gguf=_from_gguf,
)  # fmt: skip
