"""OLMoE: a Llama with experts, and with a norm of all of a token's queries, and of all its keys."""

from functools import partial

from headrace.checkpoint.config_fields import COMMON_FIELDS
from headrace.checkpoint.gguf_metadata import GgufMetadata
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.errors import ModelError
from headrace.model.architecture import Architecture, Design
from headrace.model.blocks import AttentionOptions, attention, norm, qkv_product, stage_program
from headrace.model.decoder import (
    Decoder,
    check_activation,
    sizes_from_gguf,
    sizes_from_huggingface,
    stored_name,
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
from headrace.protocol.program import HeadNorm, Operation, Program, Vector
from headrace.protocol.stored_tensor import StoredTensor


def _norms(decoder: Decoder, at: str) -> list[Operation]:
    """Of queries and keys, as one head each."""
    heads, kv_heads, head_dim = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
    found: list[Operation] = []
    # The keys begin after so many times their own width.
    for part, first, count in (("q", 0, heads), ("k", heads // kv_heads, kv_heads)):
        name, width = stored_name(decoder, f"{at}.self_attn.{part}_norm"), count * head_dim
        weight = Vector(StoredTensor(f"{name}.weight", (width,)))
        found.append(HeadNorm("qkv", first, 1, width, weight, decoder.rms_norm_epsilon))
    return found


def _program(
    decoder: Decoder, rope: RopeConfig, biased: bool, mixture: Mixture, share: StageShare
) -> Program:
    options = AttentionOptions(biased=biased)

    def layer(at: str, number: int, cache: int, delta: str | None) -> list[Operation]:
        return [
            norm(decoder, f"{at}.input_layernorm", delta=delta),
            qkv_product(decoder, at, biased=biased),
            *_norms(decoder, at),
            *attention(decoder, at, cache, rope, options),
            norm(decoder, f"{at}.post_attention_layernorm", delta="delta"),
            *experts(decoder, at, mixture),
        ]

    return stage_program(decoder, share, layer, widths=mixture.widths)


def _from_huggingface(config: HuggingFaceConfig) -> Design:
    check_activation(config, "hidden_act", ("silu", "swish"))
    decoder, rope = sizes_from_huggingface(config)
    values = config.values
    if values.clip_qkv is not None:
        raise ModelError(
            f"model {config.path}: clipped queries, keys and values (clip_qkv "
            f"{str(values.clip_qkv)[:20]}) are not supported"
        )
    mixture = Mixture(
        count=values.num_experts,
        chosen=values.num_experts_per_tok,
        inner=decoder.intermediate_size,
        normalized=bool(values.norm_topk_prob),
    )
    biased = bool(values.attention_bias)
    return Design(decoder, partial(_program, decoder, rope, biased, checked(config.path, mixture)))


def _from_gguf(metadata: GgufMetadata) -> Design:
    mixture = mixture_from_gguf(metadata, normalized=False)
    decoder, rope = sizes_from_gguf(metadata, Names().in_gguf, experts=True)
    # Whichever biases are there are added.
    return Design(decoder, partial(_program, decoder, rope, True, mixture))


OLMOE = Architecture(
    name="OlmoeForCausalLM",
    models=("OLMoE",),
    refused=("clipped queries, keys and values (clip_qkv)",),
    base_name="OlmoeModel",
    model_type="olmoe",
    config_class="OlmoeConfig",
    # clip_qkv is known, so that it is refused as what it is.
    fields=COMMON_FIELDS
    | {"attention_bias", "clip_qkv", "num_experts", "num_experts_per_tok", "norm_topk_prob"},
    ignored_fields=IGNORED_FIELDS,
    from_huggingface=_from_huggingface,
    gguf="olmoe",
    from_gguf=_from_gguf,
)
