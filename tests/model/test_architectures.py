"""Every architecture: logits and greedy tokens of transformers, from directories and GGUF files."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gguf_conversion import convert
from greedy import run_stages
from headrace.kernels import REFERENCE
from headrace.kernels import path as kernel_path
from headrace.model.architectures import ARCHITECTURES
from tiny_checkpoints import write_tiny_llama

LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
WINDOWS = ["full_attention", "sliding_attention"] * 2
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
# hidden_size is 32 and there are 4 heads, so an own head_dim differs from 8.
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9, "pad_token_id": None}
GEMMA |= {"tie_word_embeddings": True}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
    "attention_multiplier": 0.3, "pad_token_id": None,
}  # fmt: skip
# Half a head's width of 8 has 4 pairs.
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [1.2, 2.0, 3.0, 5.0],
}  # fmt: skip
PHI3_LONG = {"pad_token_id": None, "rope_parameters": LONGROPE}
QWEN_MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN_MOE |= {"pad_token_id": None}
QWEN2_MOE = QWEN_MOE | {"shared_expert_intermediate_size": 40}
QWEN3_MOE = QWEN_MOE | {"head_dim": 16, "norm_topk_prob": True}
OLMOE = {"num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": None}
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 9,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 32,
    },
}  # fmt: skip
# Of what GGUF files can say, too.
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"pad_token_id": None}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, linear rope": ("Qwen2", {"rope_parameters": LINEAR}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, tied, with biases": (
        "Qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "gemma2": ("Gemma2", GEMMA),
    "gemma2, other caps": (
        "Gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3", GEMMA | {"num_hidden_layers": 6}),
    "gemma3, two ropes": (
        "Gemma3", GEMMA | {"num_hidden_layers": 6, "rope_parameters": GEMMA3_ROPES},
    ),
    "phi3": ("Phi3", {"pad_token_id": None}),
    "phi3, a window": ("Phi3", {"pad_token_id": None, "sliding_window": 9}),
    "phi3, tied, a head of its own": (
        "Phi3", {"pad_token_id": None, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "phi3, divisors for long sequences": (
        "Phi3", PHI3_LONG | {"original_max_position_embeddings": 16},
    ),
    "phi3, divisors for short sequences": (
        "Phi3", PHI3_LONG | {"original_max_position_embeddings": 128},
    ),
    "granite": ("Granite", MULTIPLIERS),
    "granite, tied, with biases": (
        "Granite",
        MULTIPLIERS | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3": ("SmolLM3", {"pad_token_id": None}),
    "smollm3, tied": ("SmolLM3", {"pad_token_id": None, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 5}),
    "mixtral, tied, a head of its own": (
        "Mixtral", {"num_local_experts": 3, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "qwen2 moe": ("Qwen2Moe", QWEN2_MOE),
    "qwen2 moe, tied": ("Qwen2Moe", QWEN2_MOE | {"tie_word_embeddings": True}),
    "qwen3 moe": ("Qwen3Moe", QWEN3_MOE),
    "qwen3 moe, with biases": ("Qwen3Moe", QWEN3_MOE | {"attention_bias": True}),
    "olmoe": ("Olmoe", OLMOE | {"num_key_value_heads": 4}),
    "olmoe, shared keys": ("Olmoe", OLMOE),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss, tied": ("GptOss", GPT_OSS | {"tie_word_embeddings": True}),
}  # fmt: skip
# What only a directory says.
DIRECTORIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, late windows": ("Qwen2", QWEN_WINDOW),
    "qwen2, an unused window": ("Qwen2", QWEN_WINDOW | {"use_sliding_window": False}),
    "qwen2, windows by layer": ("Qwen2", QWEN_WINDOW | {"layer_types": WINDOWS}),
    "qwen3, late windows": ("Qwen3", QWEN_WINDOW | {"head_dim": 16}),
    "qwen3, windows by layer": ("Qwen3", QWEN_WINDOW | {"layer_types": WINDOWS, "head_dim": 8}),
    "gemma2, its own scale": ("Gemma2", GEMMA | {"query_pre_attn_scalar": 50}),
    "gemma2, windows by layer": ("Gemma2", GEMMA | {"layer_types": WINDOWS}),
    "gemma2, no caps": (
        "Gemma2", GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2, biases": ("Gemma2", GEMMA | {"attention_bias": True}),
    "gemma2, a head of its own": ("Gemma2", GEMMA | {"tie_word_embeddings": False}),
    "gemma3, windows by layer": ("Gemma3", GEMMA | {"layer_types": WINDOWS}),
    "gemma3, another pattern": ("Gemma3", GEMMA | {"sliding_window_pattern": 2}),
    "gemma3, a cap and its own scale": (
        "Gemma3", GEMMA | {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 50},
    ),
    "phi3, a factor of its own on attention": (
        "Phi3",
        PHI3_LONG
        | {"rope_parameters": LONGROPE | {"attention_factor": 1.3},
           "original_max_position_embeddings": 16},
    ),
    "smollm3, other layers without rotation": (
        "SmolLM3", {"pad_token_id": None, "no_rope_layers": [0, 1, 0, 1]},
    ),
    "smollm3, another interval": ("SmolLM3", {"pad_token_id": None, "no_rope_layer_interval": 2}),
    "smollm3, a window where it does not rotate": (
        "SmolLM3",
        {"pad_token_id": None, "use_sliding_window": True, "sliding_window": 9,
         "no_rope_layer_interval": 2},
    ),
    "smollm3, windows by layer": (
        "SmolLM3",
        {"pad_token_id": None, "use_sliding_window": True, "sliding_window": 9,
         "layer_types": WINDOWS},
    ),
    "smollm3, with biases": (
        "SmolLM3", {"pad_token_id": None, "attention_bias": True, "mlp_bias": True},
    ),
    "mixtral, a window": ("Mixtral", {"num_local_experts": 5, "sliding_window": 9}),
    "qwen2 moe, weights that add up to 1": ("Qwen2Moe", QWEN2_MOE | {"norm_topk_prob": True}),
    "qwen2 moe, no biases": ("Qwen2Moe", QWEN2_MOE | {"qkv_bias": False}),
    "qwen2 moe, early windows": ("Qwen2Moe", QWEN2_MOE | QWEN_WINDOW),
    "qwen2 moe, windows by layer": (
        "Qwen2Moe", QWEN2_MOE | QWEN_WINDOW | {"layer_types": WINDOWS},
    ),
    "qwen2 moe, experts in every second layer": (
        "Qwen2Moe", QWEN2_MOE | {"decoder_sparse_step": 2},
    ),
    "qwen3 moe, weights that do not add up": ("Qwen3Moe", QWEN3_MOE | {"norm_topk_prob": False}),
    "qwen3 moe, a window": (
        "Qwen3Moe", QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 9},
    ),
    "qwen3 moe, layers without experts": (
        "Qwen3Moe", QWEN3_MOE | {"mlp_only_layers": [0, 2]},
    ),
    "olmoe, weights that add up to 1": ("Olmoe", OLMOE | {"norm_topk_prob": True}),
    "olmoe, with biases": ("Olmoe", OLMOE | {"attention_bias": True}),
    "gpt-oss, windows by layer": ("GptOss", GPT_OSS | {"layer_types": WINDOWS}),
    "gpt-oss, no biases in attention": ("GptOss", GPT_OSS | {"attention_bias": False}),
}  # fmt: skip
PROMPT = torch.randint(0, 299, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def check(path: Path, reference: Any, layers: list[int], shards: int = 1) -> None:
    """Greedy tokens and their logits against the reference's, split like this."""
    tokens, logits = run_stages(path, layers, PROMPT, outputs=8, chunk=16, shards=shards)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    assert tokens == expected.argmax(-1).tolist()
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def splits(count: int) -> list[list[int]]:
    return [[count], [count - 2, 2], [1, 1, count - 2]]


def layouts(count: int) -> list[tuple[list[int], int]]:
    """Layers by stage, and shards."""
    return [*((layers, 1) for layers in splits(count)), ([count], 2), ([count - 2, 2], 2)]


def load_reference(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    # The one implementation that knows soft caps.
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


@pytest.mark.parametrize(("name", "options"), OPTIONS.values(), ids=OPTIONS.keys())
def test_directory_and_gguf_file_give_transformers_tokens_on_stages_and_shards(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    path = write_tiny_llama(tmp_path / "model", architecture=name, **options)
    reference = load_reference(path)
    file = convert(path, tmp_path / "model.gguf")
    for layers, shards in layouts(options.get("num_hidden_layers", 4)):
        check(path, reference, layers, shards)
        check(file, reference, layers, shards)


@pytest.mark.parametrize(("name", "options"), DIRECTORIES.values(), ids=DIRECTORIES.keys())
def test_a_directory_with_this_option_gives_transformers_tokens(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    path = write_tiny_llama(tmp_path / "model", architecture=name, **options)
    reference = load_reference(path)
    check(path, reference, [1, 2, 1])
    check(path, reference, [4], shards=3)


# The last of each family has most of what differs from Llama.
FAMILIES = dict(OPTIONS.values())


@pytest.mark.parametrize(("name", "options"), FAMILIES.items(), ids=FAMILIES.keys())
def test_torch_in_place_of_native_kernels_gives_transformers_tokens(
    tmp_path: Path, name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_path, "_path", REFERENCE)
    path = write_tiny_llama(tmp_path / "model", architecture=name, **options)
    check(path, load_reference(path), [options.get("num_hidden_layers", 4) - 2, 2])


def test_architectures_are_told_apart_by_all_their_names() -> None:
    for names in (
        [each.model_type for each in ARCHITECTURES],
        [name for each in ARCHITECTURES for name in (each.name, each.base_name)],
        [each.gguf for each in ARCHITECTURES if each.gguf],
    ):
        assert len(names) == len(set(names))
