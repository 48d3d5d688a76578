"""Choosing tokens from logits, with random numbers that depend on seed and token index alone."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class SlotSampling:
    """What the last stage knows of a slot: its settings, and the index of its next token."""

    seed: int
    temperature: float
    next_index: int


def sample(logits: torch.Tensor, slots: list[SlotSampling]) -> torch.Tensor:
    """One token per row, int64 [R]; advances each slot's index.

    logits: [R, vocab] of any float dtype; row r belongs to slots[r].
    """
    tokens = logits.argmax(dim=-1)
    drawing = [row for row, slot in enumerate(slots) if slot.temperature > 0]
    if drawing:
        uniforms = [uniform(slots[row].seed, slots[row].next_index) for row in drawing]
        temperatures = [slots[row].temperature for row in drawing]
        tokens[drawing] = _draw(logits[drawing], temperatures, uniforms)
    for slot in slots:
        slot.next_index += 1
    return tokens


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) of a request's token number `index`.

    Philox is counter-based (Salmon, Moraes, Dror, Shaw 2011): the key is the seed, the counter the
    index, so it depends on nothing that ran before.
    """
    bits = int(np.random.Philox(key=seed, counter=index).random_raw())
    return (bits >> 11) * 2.0**-53


def _draw(logits: torch.Tensor, temperatures: list[float], uniforms: list[float]) -> torch.Tensor:
    """Invert the cumulative distribution of softmax(logits / temperature) at each uniform."""
    scale = torch.tensor(temperatures, dtype=torch.float64, device=logits.device)[:, None]
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    wide = logits.double()
    weights = torch.exp((wide - wide.amax(dim=-1, keepdim=True)) / scale)
    cumulative = weights.cumsum(dim=-1)
    points = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None]
    chosen = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)
    return chosen.squeeze(-1).clamp_(max=logits.shape[-1] - 1)
