"""A model whose next token is a hash of all tokens before it, through every stage's cache.

One wrong, late or swapped token, block or slot changes everything after it.
"""

import math
from dataclasses import dataclass

import torch

from headrace.kernels.attention import AttentionBatch, write_kv
from headrace.protocol.model_config import ModelConfig, RopeConfig, StageShare
from headrace.protocol.sampling_params import SamplingParams
from headrace.sampling.sampler import waiting_times

VOCAB = 97
PRIME = 1_000_003
# So high above the others that about every second draw is the likeliest token.
PEAK = math.log(VOCAB)


def toy_config(num_layers: int) -> ModelConfig:
    return ModelConfig(
        architecture="Toy",
        vocab_size=VOCAB,
        hidden_size=1,
        intermediate_size=1,
        num_layers=num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        rms_norm_epsilon=1e-5,
        max_positions=256,
        tied_head=False,
        attention_bias=False,
        mlp_bias=False,
        sliding_window=None,
        rope=RopeConfig(theta=1.0),
        dtype="int64",
        eos_token_ids=(),
    )


@dataclass(frozen=True)
class ToyModel:
    """Layer l turns the newest value of a sequence into a hash of all its values so far."""

    config: ModelConfig
    share: StageShare
    dtype: torch.dtype = torch.int64

    @property
    def num_layers(self) -> int:
        return self.share.num_layers

    @property
    def samples(self) -> bool:
        return self.share.samples

    def forward(
        self, inputs: torch.Tensor, batch: AttentionBatch, caches: list[torch.Tensor]
    ) -> torch.Tensor:
        values = inputs.reshape(-1, 1)
        for layer, cache in enumerate(caches, start=self.share.first_layer):
            write_kv(values[:, :, None], values[:, :, None], cache, batch)
            hashed = []
            for row, (length, context) in enumerate(
                zip(batch.query_lens, batch.context_list, strict=True)
            ):
                table = batch.block_tables[row]
                history = cache[0][table].flatten()[:context].tolist()
                for end in range(context - length + 1, context + 1):
                    hashed.append(_hash(layer, history[:end]))
            values = torch.tensor(hashed, dtype=torch.int64).reshape(-1, 1)
        return values

    def logits(self, activations: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros(len(activations), VOCAB, dtype=torch.float64)
        scores[torch.arange(len(activations)), activations[:, 0] % VOCAB] = PEAK
        return scores


def _hash(layer: int, values: list[int]) -> int:
    result = layer + 7
    for value in values:
        result = (result * 31 + value + 1) % PRIME
    return result


def expected_outputs(
    prompt: list[int], num_layers: int, params: SamplingParams, seed: int, eos: frozenset[int]
) -> tuple[list[int], str]:
    """What the toy model answers and why it ends, computed without any of the engine.

    Only the random numbers are the sampler's own: they are its contract.
    """
    tokens, outputs = list(prompt), list[int]()
    while True:
        values = tokens
        for layer in range(num_layers):
            values = [_hash(layer, values[: end + 1]) for end in range(len(values))]
        token = values[-1] % VOCAB
        if params.temperature > 0:
            token = _draw(
                token, params.temperature, waiting_times(seed, len(outputs), VOCAB).tolist()
            )
        tokens.append(token)
        outputs.append(token)
        if token in eos and not params.ignore_eos:
            return outputs, "stop"
        if len(outputs) == params.max_tokens:
            return outputs, "length"


def _draw(likeliest: int, temperature: float, times: list[float]) -> int:
    """One of VOCAB tokens of equal weight, but for one that weighs more."""
    weights = [1.0] * VOCAB
    weights[likeliest] = math.exp(PEAK / temperature)
    return min(range(VOCAB), key=lambda token: times[token] / weights[token])
