"""Log-probabilities in the API's two styles, and in vLLM's for prompts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.engine.detokenizer import TextStream
from headrace.engine.outputs import Logprob, Logprobs
from headrace.serving.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

# JSON has no infinity; vLLM and OpenAI give this instead.
_LEAST = -9999.0
# How part of a character reads.
_PART = "\ufffd"


@dataclass
class TextOffsets:
    """Where tokens begin in a text that grows by them. stream: of that text; at: its length, in
    characters, without those that are not complete."""

    stream: TextStream
    at: int

    def next(self, token: int, reading: str) -> int:
        """Where the next token begins, which reads like that; one that goes on with a character
        does where the character does."""
        begin = self.at
        piece = self.stream.push(token)
        self.at += len(piece)
        if reading and reading[0] != _PART:
            # It ended a character that nothing completed.
            begin += len(piece) - len(piece.lstrip(_PART))
        return begin


def completion_logprobs(
    tokens: Sequence[tuple[int, str, int, Logprobs | None]], as_ids: bool
) -> CompletionLogprobs:
    """Of tokens as (id, how it reads, where it begins in the text, log-probabilities there or None
    for the first of a prompt).

    as_ids: write tokens as token_id:N, which are never ambiguous.
    """
    found = CompletionLogprobs([], [], [], [])
    for token, text, offset, entries in tokens:
        found.text_offset.append(offset)
        found.tokens.append(_shown(token, text, as_ids))
        if entries is None:
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            continue
        found.token_logprobs.append(_finite(entries[token]))
        top: dict[str, float] = {}
        # The likeliest first, so that of tokens with equal texts the likelier one is kept.
        for other, entry in _by_rank(entries):
            top.setdefault(_shown(other, entry.decoded_token, as_ids), _finite(entry))
        found.top_logprobs.append(top)
    return found


def chat_logprobs(
    tokens: Sequence[tuple[int, Logprobs]],
    top: int,
    as_ids: bool,
    bytes_of: Callable[[int], bytes],
) -> ChatLogprobs:
    """Of tokens as (id, log-probabilities there); top: how many of the likeliest to show, -1 for
    all.

    bytes_of: gives the bytes of a token.
    """
    content = []
    for token, entries in tokens:
        own = entries[token]
        text = _shown(token, own.decoded_token, as_ids)
        likeliest = [
            TopLogprob(shown, _finite(entry), list(bytes_of(other)))
            for other, entry in _by_rank(entries)
            if top == -1 or entry.rank <= top
            for shown in [_shown(other, entry.decoded_token, as_ids)]
        ]
        data = list(bytes_of(token))
        content.append(TokenLogprob(text, _finite(own), data, likeliest))
    return ChatLogprobs(content)


def prompt_logprobs(entries: Sequence[Logprobs | None]) -> PromptLogprobs:
    """One entry a prompt token, as vLLM shows them."""
    return [
        None
        if entry is None
        else {
            token: PromptLogprob(_finite(found), found.rank, found.decoded_token)
            for token, found in entry.items()
        }
        for entry in entries
    ]


def _shown(token: int, text: str, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else text


def _by_rank(entries: Logprobs) -> list[tuple[int, Logprob]]:
    return sorted(entries.items(), key=lambda item: item[1].rank)


def _finite(entry: Logprob) -> float:
    return entry.logprob if math.isfinite(entry.logprob) else _LEAST
