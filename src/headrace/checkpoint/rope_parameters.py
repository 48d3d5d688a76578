"""Rotary embedding as configurations describe it: Hugging Face's words for it, and GGUF's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.checkpoint.gguf_metadata import GgufMetadata
from headrace.checkpoint.plausible import check_rates
from headrace.errors import ModelError
from headrace.protocol.model_config import RopeConfig

_SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_SUPPORTED_GGUF = ("none", "linear", "yarn")


def rope_from_huggingface(
    path: Path, parameters: Mapping[str, Any], max_positions: int
) -> RopeConfig:
    """What transformers makes of these parameters, standardized by it.

    max_positions: max_position_embeddings. Raises ModelError for what is not supported or makes no
    sense.
    """
    kind = parameters.get("rope_type", "default")
    if kind not in _SUPPORTED:
        raise ModelError(
            f"model {path}: rope scaling {str(kind)[:100]} is not supported; supported are "
            f"{', '.join(_SUPPORTED)}"
        )
    if parameters.get("partial_rotary_factor") not in (None, 1):
        raise ModelError(
            f"model {path}: rotating only part of each head (partial_rotary_factor "
            f"{str(parameters['partial_rotary_factor'])[:20]}) is not supported"
        )
    original = parameters.get("original_max_position_embeddings") or max_positions

    def number(name: str, default: float | None = None) -> Any:
        value = parameters.get(name)
        value = default if value is None else value
        if value is None and name != "attention_factor" and "mscale" not in name:
            raise ModelError(f"model {path}: rope scaling {kind} needs {name}")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ModelError(f"model {path}: rope parameter {name} is {str(value)[:50]!r}")
        return value

    theta = number("rope_theta")
    match kind:
        case "linear":
            rope = RopeConfig(theta=theta, kind=kind, factor=number("factor"))
        case "llama3":
            rope = RopeConfig(
                theta=theta,
                kind=kind,
                factor=number("factor"),
                original_max_positions=original,
                low_freq_factor=number("low_freq_factor"),
                high_freq_factor=number("high_freq_factor"),
            )
        case "yarn":
            rope = RopeConfig(
                theta=theta,
                kind=kind,
                factor=number("factor", max_positions / original),
                original_max_positions=original,
                beta_fast=number("beta_fast", 32.0) or 32.0,
                beta_slow=number("beta_slow", 1.0) or 1.0,
                truncate=bool(parameters.get("truncate", True)),
                attention_factor=number("attention_factor"),
                mscale=number("mscale"),
                mscale_all_dim=number("mscale_all_dim"),
            )
        case "longrope":
            rope = RopeConfig(
                theta=theta,
                kind=kind,
                factor=number("factor", max_positions / original),
                original_max_positions=original,
                attention_factor=number("attention_factor"),
                short_factors=_factors(path, parameters, "short_factor"),
                long_factors=_factors(path, parameters, "long_factor"),
            )
        case _:
            # What is dynamic begins beyond max_position_embeddings.
            rope = RopeConfig(theta=theta)
    return _checked(path, rope)


def _factors(path: Path, parameters: Mapping[str, Any], name: str) -> tuple[float, ...]:
    factors = parameters.get(name)
    if not isinstance(factors, list):
        raise ModelError(f"model {path}: rope scaling longrope needs {name}, a list of numbers")
    check_rates(path, {f"rope {name} {number}": each for number, each in enumerate(factors)})
    return tuple(map(float, factors))


def rope_from_gguf(metadata: GgufMetadata, theta: float = 10000.0) -> RopeConfig:
    """The metadata's rotation. theta: where they name none. Raises ModelError as above."""
    # A factor without a type, or under its old name, means linear; zero means none.
    old = metadata.get("rope.scale_linear", float, 0.0)
    factor = metadata.get("rope.scaling.factor", float, old)
    scaling = metadata.get("rope.scaling.type", str, "linear" if factor else "none")
    if scaling not in _SUPPORTED_GGUF:
        raise ModelError(
            f"model {metadata.path}: rope scaling {scaling[:100]} is not supported; supported are "
            f"{', '.join(_SUPPORTED_GGUF)}"
        )
    context = metadata.get("context_length", int)
    original = metadata.get("rope.scaling.original_context_length", int, 0)
    rope = RopeConfig(
        theta=metadata.get("rope.freq_base", float, theta),
        kind="default" if scaling == "none" else scaling,
        factor=factor or 1.0,
        original_max_positions=original or context,
        beta_fast=metadata.get("rope.scaling.yarn_beta_fast", float, 32.0),
        beta_slow=metadata.get("rope.scaling.yarn_beta_slow", float, 1.0),
        # Not Hugging Face's attention_factor, which is the whole: llama.cpp multiplies by it,
        # whatever the kind (yarn_attn_factor in llama-context.cpp).
        scale=metadata.get("rope.scaling.attn_factor", float, 1.0),
    )
    return _checked(metadata.path, rope)


def _checked(path: Path, rope: RopeConfig) -> RopeConfig:
    names = (
        "theta", "factor", "original_max_positions", "low_freq_factor", "high_freq_factor",
        "beta_fast", "beta_slow", "scale", "attention_factor", "mscale", "mscale_all_dim",
    )  # fmt: skip
    may_be_zero = ("original_max_positions", "mscale", "mscale_all_dim")
    rates = {name: getattr(rope, name) for name in names}
    check_rates(
        path,
        {
            f"rope {name}": value
            for name, value in rates.items()
            if value is not None and not (value == 0 and name in may_be_zero)
        },
    )
    if rope.kind == "yarn" and rope.theta <= 1:
        raise ModelError(f"model {path}: rope theta is {rope.theta}, which YaRN cannot stretch")
    if rope.kind == "longrope" and rope.original_max_positions <= 1:
        raise ModelError(
            f"model {path}: rope original_max_position_embeddings is "
            f"{rope.original_max_positions}, which longrope cannot stretch"
        )
    if rope.kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ModelError(
            f"model {path}: rope low_freq_factor {rope.low_freq_factor} must be less than "
            f"high_freq_factor {rope.high_freq_factor}"
        )
    return rope
