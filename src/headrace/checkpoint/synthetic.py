"""A model that is none: stages take a given time and sample a constant token, for measuring."""

import re

import tokenizers
from tokenizers import models, pre_tokenizers

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.errors import UsageError
from headrace.protocol.messages import SyntheticTime
from headrace.protocol.model_config import LayerSize, ModelSizes

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


def synthetic_sizes(num_stages: int) -> ModelSizes:
    """One layer a stage; activations are as large as SmolLM2's, in the engine's dtype."""
    return ModelSizes(
        architecture="synthetic",
        vocab_size=_VOCABULARY,
        hidden_size=576,
        layers=(LayerSize(products=1, cache_elements=0),) * num_stages,
        rotation_elements=0,
        embedding_products=0,
        head_products=0,
        max_positions=4096,
        dtype="float32",
        eos_token_ids=(),
    )


def synthetic_tokenizer() -> Tokenizer:
    """Words w0, w1 and so on."""
    words = {f"w{number}": number for number in range(_VOCABULARY)}
    core = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(core, no_template="a synthetic model has no chat template")
