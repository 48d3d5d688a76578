"""Fixtures: the packaged model, and Hugging Face transformers as the oracle for it."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint.config import config_from_gguf
from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.locate import locate_model
from headrace.checkpoint.tokenizer import Tokenizer, tokenizer_of_gguf
from headrace.model.weights import open_tensors

# Code, prose, lists, numbers, other scripts; from one token to a few hundred.
PROMPTS = [
    "The",
    "Once upon a time, in a village by the sea,",
    "The capital of Japan is",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: Why is the sky blue?\nA:",
    "Die Hauptstadt von Deutschland ist",
    "La vie est belle parce que",
    "import numpy as np\n\nx = np.arange(10)\nprint(",
    "<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\n",
    "A B C D E F G",
    "In 1969, two astronauts",
    "SELECT name, COUNT(*) FROM users",
    "The recipe needs 200 g of flour, 3 eggs and",
    "\n\n\n",
    "東京は",
    "Water flows down the headrace to the mill wheel. " * 12,
    "She said: “I don't know.” He answered:",
    "Photosynthesis is the process by which plants turn light into " + "energy, " * 60,
]
OUTPUT_LEN = 64


@dataclass(frozen=True)
class Oracle:
    """What transformers makes of the packaged model in float32, greedily."""

    tokenizer: Tokenizer
    prompts: list[list[int]]
    outputs: list[list[int]]


def hugging_face_smollm2() -> Any:
    """LlamaForCausalLM with the dequantized tensors of the packaged GGUF file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    files = locate_model("smollm2")
    ours = config_from_gguf(read_gguf(files.path))
    config = LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        rms_norm_eps=ours.rms_norm_epsilon,
        max_position_embeddings=ours.max_positions,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope.theta},
    )
    model = LlamaForCausalLM(config).float().eval()
    source = open_tensors(files, ours)
    state = {
        name: source.load(name, tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model


@pytest.fixture(scope="session")
def smollm2_oracle() -> Oracle:
    tokenizer = tokenizer_of_gguf(read_gguf(locate_model("smollm2").path))
    model = hugging_face_smollm2()
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        generated = model.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=OUTPUT_LEN,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs = generated[:, longest:].tolist()
        # Generating in one padded batch is five times faster; this shows that each prompt alone,
        # without padding, has the same greedy answer.
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == output
    return Oracle(tokenizer, prompts, outputs)


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    """A random Llama checkpoint with a tokenizer, small enough to load in no time."""
    from tiny_checkpoints import write_tiny_llama

    return write_tiny_llama(tmp_path / "tiny")
