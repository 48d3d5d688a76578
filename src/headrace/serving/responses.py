"""What clients get back, in OpenAI's shapes, with vLLM's stop_reason and prompt_logprobs.

Source: https://platform.openai.com/docs/api-reference
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct):
    """cached_tokens: found in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of all prompts and of all completions, those of best_of that are not shown too."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(msgspec.Struct):
    """A prompt token's log-probability as vLLM shows it; rank counts from 1."""

    logprob: float
    rank: int
    decoded_token: str


# One entry a prompt token, by token id; None for the first.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct):
    """One entry a token: its text, where that begins, its log-probability and the likeliest."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    """A completion, or a piece of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct):
    """Answer of /v1/completions, or an event of it; usage is null but in the last event."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens; bytes: its text in UTF-8, maybe part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """A token of an answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry a token."""

    content: list[TokenLogprob]


class AnswerMessage(msgspec.Struct):
    """What the assistant says. reasoning_content: of models that think first, as vLLM has it; None
    if it did not. content is None then if it said nothing else."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType | None = UNSET


class ChatChoice(msgspec.Struct):
    """An answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class Chat(msgspec.Struct):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """A piece of an answer; the first has the role."""

    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """A piece of an answer, or its end."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct):
    """Event of /v1/chat/completions; usage is null but in the last event."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Model(msgspec.Struct):
    """A name that requests may call the model, and what there is to say of it.

    max_model_len: positions that a sequence may have. architecture: as the model's files call it.
    dtype: of weights, activations and cache. num_stages: that its layers are split over.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["headrace"]
    max_model_len: int
    architecture: str
    dtype: str
    num_stages: int


class ModelList(msgspec.Struct):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(msgspec.Struct):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """Answer of /detokenize."""

    prompt: str


class Health(msgspec.Struct, omit_defaults=True):
    """Answer of /health. cause: why stages are started anew, while they are."""

    status: Literal["ok", "recovering"]
    cause: str | None = None


class Version(msgspec.Struct):
    """Answer of /version."""

    version: str


class ErrorDetail(msgspec.Struct):
    """What is wrong; param: the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """Any answer that is an error."""

    error: ErrorDetail
