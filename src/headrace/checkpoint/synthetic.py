"""A model that is none: stages take a given time and sample a constant token, for measuring."""

import re

import tokenizers
from tokenizers import models, pre_tokenizers

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.errors import UsageError
from headrace.protocol.messages import SyntheticTime
from headrace.protocol.model_config import ModelConfig, RopeConfig

_VOCABULARY = 64
_MOST_MS = 60_000


def parse_stage_time(text: str) -> SyntheticTime:
    """The time that "FIXED+PER_ROW" gives in milliseconds; UsageError if it is something else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\+([0-9]+(?:\.[0-9]+)?)", text.strip())
    if match is None or not 0 < float(match[1]) + float(match[2]) <= _MOST_MS:
        raise UsageError(
            f"{text[:80]!r} is not a stage's time such as 2+0.3: milliseconds a step, and a row, "
            f"at most {_MOST_MS} in all"
        )
    return SyntheticTime(float(match[1]) / 1000, float(match[2]) / 1000)


def synthetic_config(num_stages: int) -> ModelConfig:
    """One layer a stage; activations are as large as SmolLM2's, in the engine's dtype."""
    return ModelConfig(
        architecture="synthetic",
        vocab_size=_VOCABULARY,
        hidden_size=576,
        intermediate_size=1,
        num_layers=num_stages,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        rms_norm_epsilon=1e-5,
        max_positions=4096,
        tied_head=False,
        attention_bias=False,
        mlp_bias=False,
        sliding_window=None,
        rope=RopeConfig(theta=1.0),
        dtype="float32",
        eos_token_ids=(),
    )


def synthetic_tokenizer() -> Tokenizer:
    """Words w0, w1 and so on."""
    words = {f"w{number}": number for number in range(_VOCABULARY)}
    core = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(core, no_template="a synthetic model has no chat template")
