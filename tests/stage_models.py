"""Models and their programs without any process, for tests."""

from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.locate import ModelFiles
from headrace.model.architecture import Architecture, Blueprint
from headrace.model.architectures.mistral import MISTRAL
from headrace.model.bind import bind
from headrace.model.interpreter import Interpreter
from headrace.model.read import describe_huggingface, model_from_gguf, model_from_huggingface
from headrace.model.weights import TensorSource, open_tensors
from headrace.protocol.model_config import StageShare
from headrace.protocol.program import Program


def read_model(files: ModelFiles) -> Blueprint:
    """Of a real model's files."""
    if files.kind == "gguf":
        return model_from_gguf(read_gguf(files.path))
    return model_from_huggingface(files.path)


def whole(model: Blueprint) -> Program:
    """The program of all of it."""
    return model.program(StageShare(0, model.sizes.num_layers, embeds=True, samples=True))


def described_program(
    architecture: Architecture, share: StageShare | None = None, **fields: Any
) -> Program:
    """What config.json with these fields describes, without files. share: None for all of it."""
    design = describe_huggingface(Path("model"), fields, architecture, {}).design
    layers = design.decoder.num_layers
    return design.program(share or StageShare(0, layers, embeds=True, samples=True))


def small_mistral(**fields: Any) -> Program:
    """3 layers of 2 heads of 4 numbers, one of them a key-value head."""
    sizes: dict[str, Any] = {
        "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "tie_word_embeddings": True, "sliding_window": None,
    }  # fmt: skip
    return described_program(MISTRAL, **(sizes | fields))


def load_stage(
    files: ModelFiles,
    model: Blueprint,
    share: StageShare | None = None,
    *,
    max_model_len: int | None = None,
    source: TensorSource | None = None,
) -> Interpreter:
    """In float32, as a stage loads it. share: None for all of it; max_model_len: None for the
    model's own."""
    program = whole(model) if share is None else model.program(share)
    cpu, dtype = torch.device("cpu"), torch.float32
    length = max_model_len or model.sizes.max_positions
    with torch.inference_mode():
        source = source or open_tensors(files)
        weights = bind(program, source, dtype, cpu, length, lambda _: None)
    return Interpreter(program, weights, dtype, cpu)
