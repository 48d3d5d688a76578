"""Choosing tokens from logits. sampling.sampler has its plain torch reference."""

import numpy as np
import torch

from headrace.kernels import path

# How one row's token is chosen, as the native code has it. seed and index: of the random numbers.
# row: which of the logits. top_k: 0 for none. temperature: 0 takes the likeliest, whatever else.
CHOICE = np.dtype(
    [
        ("seed", np.uint64),
        ("index", np.uint64),
        ("row", np.int64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("min_p", np.float32),
    ]
)


def choose(logits: torch.Tensor, choices: np.ndarray) -> torch.Tensor:
    """One token for each of the choices [n] of dtype CHOICE: int64 [n].

    logits: [R, vocab] of float32 or bfloat16 on a CPU that runs native kernels, left as they are.
    Each token follows from its own row and choice alone, whatever else is chosen at once.
    """
    assert path.runs_native(logits.device, logits.dtype)
    assert choices.dtype == CHOICE
    assert choices.flags.c_contiguous
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    tokens = torch.empty(len(choices), dtype=torch.int64)
    path.native.choose(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        choices.ctypes.data,
        len(choices),
        tokens.data_ptr(),
        logits.dtype == torch.bfloat16,
    )
    return tokens
