"""What a load asks a server for, and when: prompts of given lengths, moments of arrival."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase
from typing import Any, TypeVar

import msgspec
import numpy as np

from headrace.client import Client
from headrace.errors import ServerError, UsageError

_POOL_WORDS = 2000
_TRIES = 20
# vLLM's, so that prompts are alike.
_SONNET_TASK = "Pick as many lines as you can from these poem lines:\n"


@dataclass(frozen=True)
class Work:
    """One request: its prompt, a text or token ids, and how many tokens to answer at most."""

    prompt: str | list[int]
    output_len: int


@dataclass(frozen=True)
class ServerTokenizer:
    """The server's /tokenize and /detokenize, as vLLM has them. chat: prompts are messages.

    All methods raise ServerError, also where the server has no such addresses.
    """

    client: Client
    model: str
    chat: bool

    async def ids(self, text: str) -> list[int]:
        """Of the text alone, without tokens that the model wants at a prompt's beginning."""
        return await self._tokenize(prompt=text, add_special_tokens=False)

    async def length(self, prompt: str) -> int:
        """Tokens of the prompt as the request will have them, a chat's template included."""
        if self.chat:
            return len(await self._tokenize(messages=[{"role": "user", "content": prompt}]))
        return len(await self._tokenize(prompt=prompt))

    async def text(self, ids: list[int]) -> str:
        body = {"model": self.model, "tokens": ids}
        answer = await self.client.post("/detokenize", body)
        return _decode("/detokenize", answer, _Text).prompt

    async def _tokenize(self, **fields: Any) -> list[int]:
        answer = await self.client.post("/tokenize", {"model": self.model, **fields})
        return _decode("/tokenize", answer, _Tokens).tokens


@dataclass(frozen=True)
class RandomPrompts:
    """Prompts that mean nothing, of exactly so many tokens.

    range_ratio r: each length, in and out, is drawn evenly from (1 - r) to (1 + r) times what is
    given; from 0 up to below 1.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0

    async def works(self, tokenizer: ServerTokenizer, count: int, random: Random) -> list[Work]:
        lengths = [(self._draw(self.input_len, random), self._draw(self.output_len, random))
                   for _ in range(count)]  # fmt: skip
        if tokenizer.chat:
            texts = await _texts(tokenizer, [length for length, _ in lengths], random)
            return [Work(text, out) for text, (_, out) in zip(texts, lengths, strict=True)]
        # How large the vocabulary is, servers do not tell. Tokens of some text are surely in it,
        # and none of them is a special one.
        pool = sorted(set(await tokenizer.ids(_words(_POOL_WORDS, random))))
        return [Work(random.choices(pool, k=length), out) for length, out in lengths]

    def _draw(self, length: int, random: Random) -> int:
        low = math.floor(length * (1 - self.range_ratio))
        return random.randint(max(low, 1), math.ceil(length * (1 + self.range_ratio)))


@dataclass(frozen=True)
class SonnetPrompts:
    """Prompts of a poem's lines, as many as fit: all begin with the same, then come random ones.

    lines: with their line ends. prefix_len: about so many tokens are the same in all prompts.
    """

    lines: Sequence[str]
    input_len: int
    output_len: int
    prefix_len: int

    async def works(self, tokenizer: ServerTokenizer, count: int, random: Random) -> list[Work]:
        """Raises UsageError if no line fits beside the task and the prefix."""
        line_len = len(await tokenizer.ids("".join(self.lines))) / len(self.lines)
        task_len = await tokenizer.length(_SONNET_TASK)
        common = self.lines[: max(round((self.prefix_len - task_len) / line_len), 0)]
        # One more than should fit: whether they do shows when they are counted.
        num_lines = math.ceil((self.input_len - task_len) / line_len) + 1
        works = []
        for _ in range(count):
            chosen = [*common, *random.choices(self.lines, k=max(num_lines - len(common), 1))]
            while await tokenizer.length(_SONNET_TASK + "".join(chosen)) > self.input_len:
                chosen.pop()
                if len(chosen) <= len(common):
                    raise UsageError(
                        f"--sonnet-input-len {self.input_len} has no room for a line beside the "
                        f"task ({task_len} tokens) and the common lines: give more"
                    )
            works.append(Work(_SONNET_TASK + "".join(chosen), self.output_len))
        return works


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each request arrives, rate of them a second.

    The gaps have a gamma distribution with burstiness as its shape, as in vLLM's tool: 1 is a
    Poisson process, less comes in bursts, more is more even. An infinite rate is all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    return [float(moment) for moment in np.cumsum(gaps)]


async def _texts(tokenizer: ServerTokenizer, lengths: list[int], random: Random) -> list[str]:
    """A text for each length. Cut texts nearly always have as many tokens as were kept; what the
    template adds is learnt from the first."""
    texts: list[str] = []
    added = 0
    tries = 0
    while len(texts) < len(lengths):
        length = lengths[len(texts)]
        if length <= added:
            raise UsageError(f"a chat prompt of {length} tokens is too short: {added} are around")
        tokens = await tokenizer.ids(_words(length, random))
        text = await tokenizer.text(tokens[: length - added])
        wrong = await tokenizer.length(text) - length
        added += wrong
        tries = tries + 1 if wrong else 0
        if not wrong:
            texts.append(text)
        elif tries == _TRIES:
            raise ServerError(f"no text has {length} tokens after {_TRIES} tries by /tokenize")
    return texts


def _words(count: int, random: Random) -> str:
    """At least a token each, whatever the tokenizer."""
    return " ".join("".join(random.choices(ascii_lowercase, k=5)) for _ in range(count))


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


_Body = TypeVar("_Body")


def _decode(path: str, body: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise ServerError(f"{path} answered something unknown: {error}") from error
