"""A stage's model from files, as a stage loads it, for tests that need no process."""

import torch

from headrace.checkpoint.locate import ModelFiles
from headrace.model.architectures.llama import llama_program
from headrace.model.bind import bind
from headrace.model.interpreter import Interpreter
from headrace.model.weights import TensorSource, open_tensors
from headrace.protocol.model_config import ModelConfig, StageShare


def load_stage(
    files: ModelFiles,
    config: ModelConfig,
    share: StageShare | None = None,
    *,
    max_model_len: int | None = None,
    source: TensorSource | None = None,
) -> Interpreter:
    """In float32. share: None for all of it; max_model_len: None for the model's own."""
    share = share or StageShare(0, config.num_layers, embeds=True, samples=True)
    program = llama_program(config, share, gguf=files.kind == "gguf")
    cpu, dtype = torch.device("cpu"), torch.float32
    length = max_model_len or config.max_positions
    with torch.inference_mode():
        source = source or open_tensors(files)
        weights = bind(program, source, dtype, cpu, length, lambda _: None)
    return Interpreter(program, weights, dtype, cpu)
