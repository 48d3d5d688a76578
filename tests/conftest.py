"""Fixtures: the packaged model, and Hugging Face transformers as the oracle for it."""

import os
import signal
import socket

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read when torch is loaded, here and in stages. Tests share few cores with many processes: a thread
# that waits for its neighbour must leave them the core, not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import hypothesis
import pytest
import torch

from headrace.bench.model_shape import shape_of
from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.locate import locate_model
from headrace.checkpoint.tensor_check import tensors_of
from headrace.checkpoint.tokenizer import tokenizer_of_gguf
from headrace.host.cluster_key import write_cluster_key
from headrace.model.weights import open_tensors
from stage_models import read_model, whole

# Commands that tests start inherit what nohup, or a shell that starts the tests in the background,
# has them ignore.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test depends on how fast the machine is.
hypothesis.settings.register_profile("headrace", deadline=None)
hypothesis.settings.load_profile("headrace")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("HEADRACE_LONG"):
        for item in items:
            if item.get_closest_marker("long") is not None:
                item.add_marker(pytest.mark.skip(reason="a long one: set HEADRACE_LONG=1"))
    # Files that start whole engines first: with a long one at the end, all but one process would
    # have nothing to do.
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


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


def hugging_face_smollm2() -> Any:
    """LlamaForCausalLM with the dequantized tensors of the packaged GGUF file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    files = locate_model("smollm2")
    ours = read_model(files)
    sizes, shape = ours.sizes, shape_of(whole(ours))
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        rms_norm_eps=shape.rms_norm_epsilon,
        max_position_embeddings=sizes.max_positions,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
    )
    model = LlamaForCausalLM(config).float().eval()
    source = open_tensors(files)
    stored = {tensor.name: tensor for tensor in tensors_of(whole(ours))}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, sizes.num_layers)
    state = {
        name: source.load(stored[str(names.get_name(name, (".weight",)))])
        for name in model.state_dict()
        if name != "lm_head.weight"
    }
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model


@dataclass(frozen=True)
class Oracle:
    """Hugging Face transformers with the packaged model in float32. known: greedy answers."""

    model: Any
    prompts: list[list[int]]
    known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def greedy(self, prompt: list[int], answer: list[int]) -> list[int]:
        """The model's likeliest token in the place of each of the answer's, after all before it.

        The answer is the model's own greedy one exactly if it comes back unchanged; else the first
        token that differs is where it went wrong. One pass shows it, generating would take one a
        token.
        """
        known = self.known.get(tuple(prompt), [])
        if known[: len(answer)] == answer:
            return answer
        with torch.inference_mode():
            logits = self.model(
                torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1
            ).logits[0, :-1]
        tokens: list[int] = logits.argmax(-1).tolist()
        if tokens == answer:
            self.known[tuple(prompt)] = answer
        return tokens


@pytest.fixture(autouse=True)
def _handlers_are_as_before() -> Iterator[None]:
    """A command that a test runs in this process replaces them, and the interrupts of later tests
    would be lost."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def smollm2_oracle() -> Oracle:
    tokenizer = tokenizer_of_gguf(read_gguf(locate_model("smollm2").path))
    return Oracle(hugging_face_smollm2(), [tokenizer.encode(text) for text in PROMPTS])


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    """A random Llama checkpoint with a tokenizer, small enough to load in no time."""
    from tiny_checkpoints import write_tiny_llama

    return write_tiny_llama(tmp_path / "tiny")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A cluster key's file."""
    write_cluster_key(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def port() -> int:
    """One of loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number: int = listener.getsockname()[1]
        return number
