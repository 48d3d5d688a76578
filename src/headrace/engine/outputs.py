"""What requests give back: tokens turned into text as they come, and the finished completion."""

from dataclasses import dataclass, field

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

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


@dataclass
class TextStream:
    """The text of one sequence, token by token; never splits a character.

    Linear in the number of tokens. Special tokens have no text.
    """

    tokenizer: Tokenizer
    _stream: DecodeStream = field(
        default_factory=lambda: DecodeStream(skip_special_tokens=True), init=False
    )
    _sent: int = field(default=0, init=False)

    def push(self, token: int) -> str:
        """The text that this token completed."""
        piece: str = self._stream.step(self.tokenizer, token) or ""
        self._sent += len(piece)
        return piece

    def finish(self, tokens: list[int]) -> str:
        """What is left when the sequence ends, such as the bytes of an unfinished character."""
        whole: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return whole[self._sent :]
