"""Tiny Llamas in quantized GGUF files, and what transformers and the reference make of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gguf_blocks import random_rows
from gguf_conversion import convert
from headrace.kernels import reference
from tiny_checkpoints import write_tiny_llama

# K-quants come in super-blocks of 256. Heads are of 64.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def write_quantized(
    folder: Path, kind_of: Callable[[str], str], **options: Any
) -> tuple[Path, Path]:
    """A GGUF file, and a directory with the same numbers, dequantized.

    kind_of: given the name of a matrix in the directory, how the file holds it. K-quants, which the
    gguf package does not make, are of random blocks.
    """
    model = write_tiny_llama(folder / "model", **{**SIZES, **options})
    weights = load_file(model / "model.safetensors")
    quantized: dict[str, tuple[gguf.GGMLQuantizationType, np.ndarray]] = {}
    for name, tensor in weights.items():
        if tensor.dim() != 2:
            continue
        kind = gguf.GGMLQuantizationType[kind_of(name)]
        if kind.name.endswith("_K"):
            rows = random_rows(kind.name, len(tensor), tensor.shape[1], len(quantized))
        else:
            rows = gguf.quants.quantize(tensor.numpy() / 4, kind)
        quantized[name] = kind, rows
        weights[name] = torch.from_numpy(gguf.quants.dequantize(rows, kind).copy())
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return convert(model, folder / "model.gguf", quantized=quantized), model


def rounds_activations(module: nn.Linear) -> None:
    """From now on the layer multiplies what is rounded to 8 bits by its weight."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return reference.quantized_linear(x, module.weight, module.bias).float()

    module.forward = forward  # type: ignore[method-assign, assignment]
