"""Log-probabilities in the API's two styles, and in vLLM's for prompts, written as JSON.

There may be a million of them, so all of this is work in parts (pieces.Work).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.engine.detokenizer import Detokenizer, TextStream
from headrace.protocol.messages import TokenLogprobs
from headrace.serving.pieces import Pieces, Text, Work
from headrace.serving.responses import (
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
)

# JSON has no infinity; vLLM and OpenAI give this instead.
_LEAST = -9999.0
# Log-probabilities written in one part: a millisecond or two, some more for tokens whose text was
# never needed before.
_AT_ONCE = 500

# How part of a character reads.
_PART = "\ufffd"

_encode = msgspec.json.Encoder().encode


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


@dataclass
class CompletionColumns:
    """Some tokens' log-probabilities in the completions' style, a text for each column."""

    text_offset: Text = field(default_factory=Text)
    token_logprobs: Text = field(default_factory=Text)
    tokens: Text = field(default_factory=Text)
    top_logprobs: Text = field(default_factory=Text)
    empty: bool = True

    def add(self, rows: CompletionLogprobs) -> None:
        """At the end."""
        comma = b"" if self.empty else b","
        self.empty = False
        for name in rows.__struct_fields__:
            text: Text = getattr(self, name)
            text.add(comma + _encode(getattr(rows, name))[1:-1])


def completion_columns(
    tokens: Sequence[tuple[int, TokenLogprobs | None]],
    offset_of: Callable[[int, str], int],
    as_ids: bool,
    reader: Detokenizer,
) -> Work[CompletionColumns]:
    """Of tokens as (id, log-probabilities there or None for the first of a prompt).

    offset_of: where the next token begins in the text, by its id and how it reads. as_ids: write
    tokens as token_id:N, which are never ambiguous.
    """
    text_of = reader.text_of
    columns = CompletionColumns()
    rows = CompletionLogprobs([], [], [], [])
    written = 0
    for token, entries in tokens:
        text = text_of(token)
        rows.text_offset.append(offset_of(token, text))
        rows.tokens.append(_shown(token, text, as_ids))
        written += 1
        if entries is None:
            rows.token_logprobs.append(None)
            rows.top_logprobs.append(None)
        else:
            rows.token_logprobs.append(_finite(entries.logprobs[0]))
            top: dict[str, float] = {}
            rows.top_logprobs.append(top)
            for some in _batches(_by_rank(entries), _AT_ONCE):
                # The likeliest first, so that of tokens with equal texts the likelier one is kept.
                for other, logprob, _ in some:
                    top.setdefault(_shown(other, text_of(other), as_ids), _finite(logprob))
                written += len(some)
                if len(some) == _AT_ONCE:
                    yield
        if written >= _AT_ONCE:
            columns.add(rows)
            rows = CompletionLogprobs([], [], [], [])
            written = 0
            yield
    if rows.tokens:
        columns.add(rows)
    return columns


def completion_logprobs(parts: Sequence[CompletionColumns]) -> Pieces:
    """A responses.CompletionLogprobs of all these tokens."""
    written = [part for part in parts if not part.empty]
    pieces: Pieces = []
    opening = b"{"
    for name in CompletionLogprobs.__struct_fields__:
        pieces.append(opening + b'"%b":[' % name.encode())
        for number, part in enumerate(written):
            if number:
                pieces.append(b",")
            text: Text = getattr(part, name)
            pieces += text.pieces()
        opening = b"],"
    return [*pieces, b"]}"]


def chat_logprobs(
    tokens: Sequence[tuple[int, TokenLogprobs]],
    top: int,
    as_ids: bool,
    reader: Detokenizer,
) -> Work[Pieces]:
    """A responses.ChatLogprobs of tokens as (id, log-probabilities there); top: how many of the
    likeliest to show, -1 for all. as_ids: as for completions.
    """
    text_of, bytes_of = reader.text_of, reader.bytes_of
    json = Text()
    opening = b'{"content":['
    written = 0
    for token, entries in tokens:
        text = text_of(token)
        own = TokenLogprob(
            _shown(token, text, as_ids),
            _finite(entries.logprobs[0]),
            list(bytes_of(token)),
            [],
        )
        json.add(opening + _encode(own).removesuffix(b"]}"))
        opening = b"]},"
        comma = b""
        likeliest = (item for item in _by_rank(entries) if top == -1 or item[2] <= top)
        for some in _batches(likeliest, _AT_ONCE):
            shown = []
            for other, logprob, _ in some:
                text = text_of(other)
                data = list(bytes_of(other))
                shown.append(TopLogprob(_shown(other, text, as_ids), _finite(logprob), data))
            json.add(comma + _encode(shown)[1:-1])
            comma = b","
            written += len(some)
            if len(some) == _AT_ONCE:
                yield
        written += 1
        if written >= _AT_ONCE:
            written = 0
            yield
    json.add(b"]}]}" if tokens else b'{"content":[]}')
    return json.pieces()


def prompt_logprobs(report: Sequence[TokenLogprobs], reader: Detokenizer) -> Work[Pieces]:
    """A responses.PromptLogprobs, as vLLM shows them: one entry a prompt token, null for the first,
    of which the report has nothing."""
    text_of = reader.text_of
    json = Text()
    json.add(b"[null")
    written = 0
    for entries in report:
        opening = b",{"
        for some in _batches(_own_first(entries), _AT_ONCE):
            shown = {
                token: PromptLogprob(_finite(logprob), rank, text_of(token))
                for token, logprob, rank in some
            }
            json.add(opening + _encode(shown)[1:-1])
            opening = b","
            written += len(some)
            if written >= _AT_ONCE:
                written = 0
                yield
        json.add(b"}")
    json.add(b"]")
    return json.pieces()


# Token, log-probability, rank.
_Entry = tuple[int, float, int]


def _own_first(entries: TokenLogprobs) -> Iterator[_Entry]:
    """The token that is there, then the likeliest others."""
    own = entries.ids[0]
    yield own, entries.logprobs[0], entries.rank
    for rank in range(1, len(entries.ids)):
        if entries.ids[rank] != own:
            yield entries.ids[rank], entries.logprobs[rank], rank


def _by_rank(entries: TokenLogprobs) -> Iterator[_Entry]:
    """The likeliest first; the token that is there before its equals."""
    others = _own_first(entries)
    own = next(others)
    waiting = True
    for other in others:
        if waiting and other[2] >= own[2]:
            waiting = False
            yield own
        yield other
    if waiting:
        yield own


def _batches(entries: Iterator[_Entry], size: int) -> Iterator[list[_Entry]]:
    """All of them, `size` at once."""
    while some := list(itertools.islice(entries, size)):
        yield some


def _shown(token: int, text: str, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else text


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
