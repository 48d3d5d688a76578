"""What answers in `headrace chat`: an engine in this process, or a server."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from headrace.async_llm import AsyncLLM
from headrace.checkpoint.chat_template import Message
from headrace.client import Client
from headrace.errors import ServerError, UsageError
from headrace.prompts import tokenized_chat
from headrace.sampling_params import SamplingParams
from headrace.serving.harmony import HarmonyText, speaks_harmony

# Statuses by which servers refuse a conversation that is too long, among other things.
_TOO_LONG = (400, 413)


class Piece(NamedTuple):
    """The next text of an answer, possibly none; finish_reason comes with the last one."""

    text: str
    finish_reason: str | None


# Answers a conversation piece by piece. To close the generator ends the request. Raises UsageError
# or ServerError if this one request is at fault, PipelineError if there is nobody to answer more.
Answers = Callable[[list[Message]], AsyncGenerator[Piece, None]]


def engine_answers(engine: AsyncLLM, params: SamplingParams) -> Answers:
    """Answers of the model in this process, without a reasoning that harmony keeps apart."""
    limit = engine.card.max_model_len

    async def answer(messages: list[Message]) -> AsyncGenerator[Piece, None]:
        prompt = tokenized_chat(messages, engine.tokenizer, limit).token_ids
        if len(prompt) >= limit:
            raise UsageError(
                f"the conversation has {len(prompt)} tokens, the context {limit}: "
                "/reset forgets what was said"
            )
        harmony = HarmonyText() if speaks_harmony(engine.tokenizer.core) else None
        # Its channels are marked by special tokens.
        own = params if harmony is None else replace(params, skip_special_tokens=False)
        submission = await engine.submit([prompt], own)
        try:
            async for _, deltas in submission:
                for delta in deltas:
                    text, reason = delta.text, delta.finish_reason
                    if harmony is not None:
                        _, text = harmony.push(text, last=reason is not None)
                    yield Piece(text, reason)
        finally:
            submission.abort()

    return answer


async def served_model(url: str, api_key: str | None) -> str:
    """The name of the server's first model. Raises ServerError, UsageError for no address."""
    async with Client(url, api_key) as client:
        models = await client.models()
    if not models:
        raise ServerError(f"{url} has no model")
    return models[0]


def server_answers(url: str, api_key: str | None, model: str, sampling: dict[str, Any]) -> Answers:
    """Answers of a server's model; sampling: fields of the request besides model and messages."""

    async def answer(messages: list[Message]) -> AsyncGenerator[Piece, None]:
        body = {"model": model, "messages": messages, "stream": True, **sampling}
        # A client for each answer: there may be minutes between two, and no event loop meanwhile.
        async with Client(url, api_key) as client:
            try:
                async with aclosing(client.stream("/v1/chat/completions", body)) as events:
                    async for event in events:
                        for choice in _choices(event):
                            yield Piece(choice.delta.content or "", choice.finish_reason)
            except ServerError as error:
                if error.status not in _TOO_LONG or len(messages) == 1:
                    raise
                raise ServerError(f"{error} (/reset forgets what was said)", error.status) from None

    return answer


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


def _choices(event: bytes) -> list[_Choice]:
    try:
        return msgspec.json.decode(event, type=_Chunk).choices
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerError(f"the server sent no chat completion: {error}") from error
