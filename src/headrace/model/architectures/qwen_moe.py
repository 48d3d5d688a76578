"""What Qwen 2 and 3 with experts share: layers without any, and names of configurations' fields."""

from headrace.checkpoint.config_fields import COMMON_FIELDS
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.checkpoint.plausible import check_sizes
from headrace.errors import ModelError
from headrace.model.blocks import gate_up_product, gated_down
from headrace.model.decoder import Decoder
from headrace.model.mixture import Mixture, checked, experts
from headrace.protocol.program import Operation

FIELDS = COMMON_FIELDS | {
    "moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok",
    "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "use_sliding_window",
    "sliding_window",
}  # fmt: skip


def mixture_from_config(config: HuggingFaceConfig) -> Mixture:
    """The experts of a model directory; raises ModelError."""
    values = config.values
    mixture = Mixture(
        count=values.num_experts,
        chosen=values.num_experts_per_tok,
        inner=values.moe_intermediate_size,
        normalized=bool(values.norm_topk_prob),
    )
    return checked(config.path, mixture)


def dense_layers(config: HuggingFaceConfig) -> frozenset[int]:
    """Layers that have no experts; raises ModelError."""
    step, named = config.values.decoder_sparse_step, config.values.mlp_only_layers
    check_sizes(config.path, {"decoder_sparse_step": step})
    if not all(isinstance(number, int) for number in named):
        raise ModelError(f"model {config.path}: mlp_only_layers must hold numbers of layers")
    if step == 1:
        return frozenset(named)
    return frozenset(n for n in range(config.num_layers) if (n + 1) % step or n in named)


def inner_part(decoder: Decoder, at: str, mixture: Mixture | None) -> list[Operation]:
    """What a layer has after attention, from normed to delta; without experts for None."""
    if mixture is not None:
        return experts(decoder, at, mixture)
    return [gate_up_product(decoder, at), *gated_down(decoder, at)]
