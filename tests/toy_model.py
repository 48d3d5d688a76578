"""A model whose next token is a hash of all tokens before it, through every stage's cache.

One wrong, late or swapped token, block or slot changes everything after it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace.engine.request import FinishReason
from headrace.kernels.batch import AttentionBatch
from headrace.kernels.kv_cache import KvCache, new_cache
from headrace.protocol.model_config import StageShare
from headrace.protocol.program import CacheShape, Program, SoftCap
from headrace.sampling.sampler import waiting_times
from headrace.sampling_params import SamplingParams

VOCAB = 97
PRIME = 1_000_003
# So high above the others that about every second draw is the likeliest token.
PEAK = math.log(VOCAB)


def toy_tokenizer() -> Tokenizer:
    """Token n is the word t<n>; words are joined by spaces."""
    made = Tokenizer(models.WordLevel({_word(n): n for n in range(VOCAB)}, unk_token=_word(0)))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


@dataclass
class ToyModel:
    """Layer l turns the newest value of a sequence into a hash of all its values so far."""

    share: StageShare
    dtype: torch.dtype = torch.int64
    caches: list[KvCache] = field(default_factory=list, init=False)

    @property
    def program(self) -> Program:
        head = (SoftCap("logits", 1.0),) if self.share.samples else ()
        return Program(1, VOCAB, (), head, (CacheShape(1, 1),) * self.share.num_layers, {})

    def allocate(self, num_blocks: int, block_size: int) -> None:
        sizes = num_blocks, block_size, 1, 1
        cpu = torch.device("cpu")
        self.caches = [new_cache(*sizes, self.dtype, cpu) for _ in self.program.caches]

    def forward(self, inputs: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        # Small arrays: numpy is several times faster than torch.
        values = inputs.flatten().numpy()
        index, tables = batch.cache_index.numpy(), batch.block_tables.numpy()
        for layer, cache in enumerate(self.caches, start=self.share.first_layer):
            size = cache.block_size
            held = cache.keys.numpy()[:, 0, 0, :size, 0]
            held[index // size, index % size] = values
            histories = held[tables].reshape(len(tables), -1).tolist()
            hashed: list[int] = []
            for history, length, context in zip(
                histories, batch.query_lens, batch.context_list, strict=True
            ):
                hashed += list(_hashes(layer, history[:context]))[-length:]
            values = np.array(hashed)
        return torch.from_numpy(values)[:, None]

    def logits(self, activations: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros(len(activations), VOCAB, dtype=torch.float64)
        return scores.scatter_(1, activations % VOCAB, PEAK)


def _hashes(layer: int, values: Iterable[int]) -> Iterator[int]:
    """A hash of each beginning of the values."""
    result = layer + 7
    for value in values:
        result = (result * 31 + value + 1) % PRIME
        yield result


@dataclass(frozen=True)
class Answer:
    """A completion: its tokens, the text that is shown, and why it ends."""

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None


def expected_answer(
    prompt: list[int], num_layers: int, params: SamplingParams, seed: int, eos: frozenset[int]
) -> Answer:
    """What the toy model answers, computed without any of the engine.

    Only the random numbers are the sampler's own: they are its contract.
    """
    hashes = [layer + 7 for layer in range(num_layers)]

    def after(value: int) -> int:
        """The likeliest token after one more token."""
        for layer, so_far in enumerate(hashes):
            value = hashes[layer] = (so_far * 31 + value + 1) % PRIME
        return value % VOCAB

    for token in prompt:
        likeliest = after(token)
    outputs: list[int] = []
    text = ""
    while True:
        scores = _scores(likeliest, params, outputs)
        token = int(scores.argmax())
        if params.temperature > 0:
            with np.errstate(divide="ignore"):
                times = waiting_times(seed, len(outputs), VOCAB) / np.exp(
                    scores / params.temperature
                )
            token = int(times.argmin())
        outputs.append(token)
        if (token in eos and not params.ignore_eos) or token in params.stop_token_ids:
            eos_ended = token in eos and not params.ignore_eos
            return Answer(outputs, text, "stop", None if eos_ended else token)
        # The answer's text continues the prompt's.
        text += " " + _word(token)
        ends = [(text.find(stop) + len(stop), stop) for stop in params.stop if stop in text]
        if ends:
            end, stop = min(ends, key=lambda entry: entry[0])
            return Answer(outputs, text[: end - len(stop)], "stop", stop)
        if len(outputs) == params.max_tokens:
            return Answer(outputs, text, "length", None)
        likeliest = after(token)


def _word(token: int) -> str:
    return f"t{token}"


def _scores(likeliest: int, params: SamplingParams, outputs: list[int]) -> np.ndarray:
    """Equal for all tokens, but for the likeliest, biases, and what would complete a bad word."""
    scores = np.zeros(VOCAB)
    scores[likeliest] = PEAK
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    said = "".join(f"{_word(token)} " for token in outputs)
    for word in params.bad_words:
        *beginning, last = word.split()
        if f" {said}".endswith("".join(f" {own}" for own in beginning) + " "):
            scores[int(last[1:])] = -np.inf
    return scores
