"""What requests give back: tokens turned into text as they come, and the finished completion."""

from dataclasses import dataclass

from tokenizers import Tokenizer

from headrace.engine.request import FinishReason


@dataclass(frozen=True)
class OutputDelta:
    """One accepted token of a request, with the text it completed (possibly none yet).

    token is None when the request ended without one (an abort).
    """

    request_id: int
    token: int | None
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class CompletionOutput:
    """One finished completion, named as in vLLM."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True)
class RequestOutput:
    """A finished request, named as in vLLM. first_token_s counts from the request's arrival."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    first_token_s: float | None = None
    total_s: float = 0.0
    finished: bool = True


# A character has at most four bytes, hence four tokens of a byte each: no longer end of the tokens
# can be the beginning of one.
_MOST_PENDING = 4
_INCOMPLETE = "\ufffd"


class TextStream:
    """The text of one sequence, token by token; never splits a character.

    Each token is decoded together with the piece before it, since decoders look at their
    neighbours (a leading space that belongs only inside a text, a character of several tokens).
    Linear in the number of tokens. Special tokens have no text. tokenizers' own DecodeStream is
    not used because it raises an error when a later byte makes earlier ones invalid.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)
        # The tokens still needed: context whose text is out already, then those pending.
        self._tokens: list[int] = []
        self._context = 0

    def push(self, token: int) -> str:
        """The text that this token completed."""
        if token in self._special:
            return ""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        pending = len(self._tokens) - self._context
        if text.endswith(_INCOMPLETE) and pending < _MOST_PENDING:
            return ""
        piece = text[len(self._decode(self._tokens[: self._context])) :]
        if piece:
            del self._tokens[: self._context]
            self._context = len(self._tokens)
        elif pending >= _MOST_PENDING:
            # No text, so nothing to be context for what follows.
            del self._tokens[self._context :]
        return piece

    def finish(self) -> str:
        """What is left when the sequence ends: the bytes of an unfinished character."""
        done = self._decode(self._tokens[: self._context])
        return self._decode(self._tokens)[len(done) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
