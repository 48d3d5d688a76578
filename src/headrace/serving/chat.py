"""/v1/chat/completions: answers conversations."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from headrace.conversation import ConversationError, render_conversation
from headrace.engine.outputs import Logprobs, OutputDelta, OutputGatherer
from headrace.errors import UsageError
from headrace.protocol.sampling_params import SamplingParams
from headrace.serving.answers import EventStream, WholeAnswer
from headrace.serving.errors import ApiError
from headrace.serving.logprobs import chat_logprobs, prompt_logprobs
from headrace.serving.requests import ChatBody, Messages
from headrace.serving.responses import (
    AnswerMessage,
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    PromptLogprobs,
    Usage,
)
from headrace.serving.sampling import (
    check_room,
    check_stream_options,
    salt_of,
    sampling_params,
)
from headrace.serving.service import Generation, Service, finish_reason
from headrace.serving.usage import TokenCount

_FIELDS = {name: name for name in ChatBody.__struct_fields__} | {"logprobs": "top_logprobs"}
# Threads of their own: templates that take long hold up chats alone.
_RENDERING = ThreadPoolExecutor(2, "headrace-chats")


async def answer_chat(service: Service, body: ChatBody) -> Response:
    """Answer a request, whole or as a stream. Raises ApiError."""
    engine = service.ready()
    service.check_model(body.model)
    include_usage = check_stream_options(body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    # The newer name wins, as in vLLM.
    newer = body.max_completion_tokens is not None
    max_tokens = body.max_completion_tokens if newer else body.max_tokens
    field = "max_completion_tokens" if newer else "max_tokens"
    fields = {**_FIELDS, "max_tokens": field}
    params = sampling_params(
        body,
        fields,
        n=body.n or 1,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        defaults=engine.running.sampling_defaults,
    )
    prompt = await encode_messages(
        service,
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        template_options=body.chat_template_kwargs,
        add_special_tokens=bool(body.add_special_tokens),
    )
    check_room(
        len(prompt),
        max_tokens,
        engine.running.max_model_len,
        prompt_field="messages",
        field=field,
    )
    answer = _Answer(service, body, params, prompt)
    # From here on something runs, which only the answer ends.
    generation = await service.begin([prompt], params, body.priority or 0, fields, salt_of(body))
    if body.stream:
        return EventStream(_events(answer, generation, include_usage), generation.close)
    return WholeAnswer(_whole(answer, generation), generation.close)


async def encode_messages(
    service: Service,
    messages: Messages,
    *,
    add_generation_prompt: bool,
    template_options: dict[str, object] | None,
    add_special_tokens: bool,
) -> list[int]:
    """Token ids of a conversation. Raises ApiError if the template refuses it."""
    running = service.ready().running
    loop = asyncio.get_running_loop()
    try:
        text = await loop.run_in_executor(
            _RENDERING,
            render_conversation,
            messages,
            running.tokenizer,
            running.max_model_len,
            add_generation_prompt,
            template_options or {},
        )
    except ConversationError as error:
        code = "context_length_exceeded" if error.too_long else None
        raise ApiError(400, str(error), param=error.field, code=code) from error
    except UsageError as error:
        raise ApiError(400, str(error), param="messages") from error
    return await service.encode(text, add_special_tokens, "messages")


class _Answer:
    """What is the same in all parts of an answer."""

    def __init__(
        self, service: Service, body: ChatBody, params: SamplingParams, prompt: list[int]
    ) -> None:
        self._bytes_of = service.ready().running.engine.reader.bytes_of
        self.body = body
        self.params = params
        self.prompt = prompt
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = body.model or service.model_name

    def chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        of_prompt: PromptLogprobs | UnsetType = UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            self.id, "chat.completion.chunk", self.created, self.model, choices, usage, of_prompt
        )

    def logprobs_of(self, tokens: list[tuple[int, Logprobs]]) -> ChatLogprobs | None:
        """None unless they are asked for."""
        if not self.body.logprobs:
            return None
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return chat_logprobs(tokens, self.body.top_logprobs or 0, as_ids, self._bytes_of)


async def _whole(answer: _Answer, generation: Generation) -> Chat:
    gatherer = OutputGatherer("", None, answer.prompt, answer.params)
    count = TokenCount([answer.prompt])
    async for number, deltas in generation:
        count.take(number, deltas)
        for delta in deltas:
            gatherer.take(delta)
    output = gatherer.output()
    choices = []
    for completion in output.outputs:
        tokens = list(zip(completion.token_ids, completion.logprobs or (), strict=False))
        choices.append(
            ChatChoice(
                completion.index,
                AnswerMessage("assistant", completion.text),
                answer.logprobs_of(tokens),
                finish_reason(completion.finish_reason),
                completion.stop_reason,
            )
        )
    of_prompt = UNSET if output.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs)
    return Chat(
        answer.id,
        "chat.completion",
        answer.created,
        answer.model,
        choices,
        count.usage(),
        of_prompt,
    )


async def _events(
    answer: _Answer, generation: Generation, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    encode = msgspec.json.Encoder().encode
    no_usage = None if include_usage else UNSET
    count = TokenCount([answer.prompt])
    of_prompt: list[Logprobs | None] | None = None
    if answer.params.prompt_logprobs is not None:
        of_prompt = [None]
    begun: set[int] = set()
    async for number, deltas in generation:
        count.take(number, deltas)
        for delta in deltas:
            if of_prompt is not None and delta.prompt_logprobs:
                of_prompt += delta.prompt_logprobs
        if of_prompt is not None and len(of_prompt) == len(answer.prompt):
            yield encode(answer.chunk([], no_usage, prompt_logprobs(of_prompt)))
            of_prompt = None
        by_index: dict[int, list[OutputDelta]] = {}
        for delta in deltas:
            if delta.token is not None or delta.finish_reason is not None:
                by_index.setdefault(delta.index, []).append(delta)
        for index, own in by_index.items():
            if index not in begun:
                # Not before its first token: load generators take it for that.
                begun.add(index)
                first = ChatChunkChoice(index, ChatDelta("", "assistant"), None, None)
                yield encode(answer.chunk([first], no_usage))
            yield encode(answer.chunk([_piece(answer, index, own)], no_usage))
    if include_usage:
        yield encode(answer.chunk([], count.usage()))


def _piece(answer: _Answer, index: int, deltas: list[OutputDelta]) -> ChatChunkChoice:
    """What the deltas of one completion, in order, add to its text."""
    tokens = [
        (delta.token, delta.logprobs)
        for delta in deltas
        if delta.token is not None and delta.logprobs is not None
    ]
    last = deltas[-1]
    reason = finish_reason(last.finish_reason)
    return ChatChunkChoice(
        index,
        ChatDelta("".join([delta.text for delta in deltas])),
        answer.logprobs_of(tokens),
        reason,
        last.stop_reason if reason else UNSET,
    )
