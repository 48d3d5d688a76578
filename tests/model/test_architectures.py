"""Every architecture: logits and greedy tokens of transformers, from directories and GGUF files."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gguf_conversion import convert
from greedy import run_stages
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
}  # fmt: skip
PROMPT = torch.randint(0, 299, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def check(path: Path, reference: Any, layers: list[int]) -> None:
    """Greedy tokens and their logits against the reference's, split like this."""
    tokens, logits = run_stages(path, layers, PROMPT, outputs=8, chunk=16)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    assert tokens == expected.argmax(-1).tolist()
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def splits(count: int) -> list[list[int]]:
    return [[count], [count - 2, 2], [1, 1, count - 2]]


def load_reference(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    # The one implementation that knows soft caps.
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


@pytest.mark.parametrize(("name", "options"), OPTIONS.values(), ids=OPTIONS.keys())
def test_directory_and_gguf_file_give_transformers_tokens_on_1_2_and_3_stages(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    path = write_tiny_llama(tmp_path / "model", architecture=name, **options)
    reference = load_reference(path)
    for layers in splits(options.get("num_hidden_layers", 4)):
        check(path, reference, layers)
        file = tmp_path / "model.gguf"
        check(file if file.exists() else convert(path, file), reference, layers)


@pytest.mark.parametrize(("name", "options"), DIRECTORIES.values(), ids=DIRECTORIES.keys())
def test_a_directory_with_this_option_gives_transformers_tokens(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    path = write_tiny_llama(tmp_path / "model", architecture=name, **options)
    check(path, load_reference(path), [1, 2, 1])


def test_architectures_are_told_apart_by_all_their_names() -> None:
    for names in (
        [each.model_type for each in ARCHITECTURES],
        [name for each in ARCHITECTURES for name in (each.name, each.base_name)],
        [each.gguf for each in ARCHITECTURES if each.gguf],
    ):
        assert len(names) == len(set(names))
