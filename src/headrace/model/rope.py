"""Rotary embedding tables, with the ways to stretch them that Llama-family models use."""

import math

import torch

from headrace.protocol.model_config import RopeConfig


def rotation_tables(
    rope: RopeConfig, head_dim: int, length: int, frequency_factors: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for positions 0 to length - 1, each float32 [length, head_dim / 2].

    frequency_factors: float32 [head_dim / 2], divisors that a GGUF file brings in place of the
    llama3 parameters, and of longrope's.
    """
    frequencies, scale = inverse_frequencies(rope, head_dim, length)
    if frequency_factors is not None:
        frequencies = frequencies / frequency_factors
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos() * scale, angles.sin() * scale


def inverse_frequencies(rope: RopeConfig, head_dim: int, length: int) -> tuple[torch.Tensor, float]:
    """Angle a position per pair, float32 [head_dim / 2], and the factor on cos and sin, where
    sequences are of up to `length` positions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return base / rope.factor, rope.scale
    if rope.kind == "llama3":
        return _llama3(rope, base), rope.scale
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim), _yarn_scale(rope) * rope.scale
    if rope.kind == "longrope":
        return _longrope(rope, base, length), _longrope_scale(rope) * rope.scale
    return base, rope.scale


def _llama3(rope: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    """Slow pairs are stretched, fast ones kept, those between interpolated.

    Source: `rope_scaling` of Llama 3.1, in the reference code at
    https://github.com/meta-llama/llama-models (apply_scaling).
    """
    wavelengths = 2 * math.pi / base
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    blend = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - blend) * base / rope.factor + blend * base
    stretched = torch.where(wavelengths > longest, base / rope.factor, base)
    return torch.where((wavelengths <= longest) & (wavelengths >= shortest), between, stretched)


def _yarn(rope: RopeConfig, base: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Pairs by their number of turns over the original context (arXiv 2309.00071, section 3.2)."""

    def pair_with_turns(turns: float) -> float:
        span = rope.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


def _yarn_scale(rope: RopeConfig) -> float:
    """Factor on cos and sin that stands for the attention temperature (same paper, eq. 22)."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


def _longrope(rope: RopeConfig, base: torch.Tensor, length: int) -> torch.Tensor:
    """A divisor for each pair (arXiv 2402.13753).

    One set for all positions and all sequences: transformers changes the set when a sequence
    outgrows the original context, which the keys that are cached by then do not follow.
    """
    factors = rope.long_factors if length > rope.original_max_positions else rope.short_factors
    return base / torch.tensor(factors, dtype=torch.float32)


def _longrope_scale(rope: RopeConfig) -> float:
    """Factor on cos and sin (same paper, section 4.2, by the growth of the context's logarithm)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))
