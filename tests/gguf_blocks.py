"""Rows of random blocks of every quantized kind, as GGUF files have them."""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

# Where a block has its scale and, if any, its minimum, float16, and how large numbers are to be.
_HALVES = {
    "Q4_0": {0: 0.01},
    "Q4_1": {0: 0.01, 2: 0.1},
    "Q5_0": {0: 0.005},
    "Q5_1": {0: 0.005, 2: 0.1},
    "Q8_0": {0: 0.001},
    "Q4_K": {0: 0.0003, 2: 0.0003},
    "Q5_K": {0: 0.0002, 2: 0.0003},
    "Q6_K": {208: 0.0001},
}


def random_rows(kind: str, rows: int, ins: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, bytes of a row] of any numbers, scales of either sign."""
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, ins // numbers, size), dtype=np.uint8)
    for at, scale in _HALVES[kind].items():
        halves = (rng.standard_normal(raw.shape[:2]) * scale).astype(np.float16)
        raw[:, :, at : at + 2] = halves[..., None].view(np.uint8)
    return raw.reshape(rows, -1)
