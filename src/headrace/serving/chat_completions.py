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
from headrace.errors import UsageError
from headrace.protocol.messages import TokenLogprobs
from headrace.sampling_params import SamplingParams
from headrace.serving.answer_size import check_answer_size
from headrace.serving.answers import EventStream, WholeAnswer
from headrace.serving.api_errors import ApiError
from headrace.serving.choices import Choices
from headrace.serving.engine_request import (
    check_room,
    check_stream_options,
    salt_of,
    sampling_params,
)
from headrace.serving.harmony import HarmonyText, speaks_harmony
from headrace.serving.logprobs import chat_logprobs, prompt_logprobs
from headrace.serving.pieces import LATER, Pieces, fill, in_turns
from headrace.serving.requests import ChatBody, Messages
from headrace.serving.responses import (
    AnswerMessage,
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    PromptLogprobs,
    Usage,
)
from headrace.serving.service import Generation, Service

_FIELDS = {name: name for name in ChatBody.__struct_fields__} | {"logprobs": "top_logprobs"}
# Threads of their own: templates that take long hold up chats alone.
_RENDERING = ThreadPoolExecutor(2, "headrace-chats")
_encode = msgspec.json.Encoder().encode


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
        defaults=engine.card.sampling_defaults,
    )
    # Special tokens part reasoning and answer, for those who want them parted.
    parted = body.skip_special_tokens is not False and speaks_harmony(engine.tokenizer.core)
    if parted:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
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
        engine.card.max_model_len,
        prompt_field="messages",
        field=field,
    )
    check_answer_size(
        [prompt],
        params,
        report_shown=1,
        echoed=False,
        max_model_len=engine.card.max_model_len,
        vocab_size=engine.card.vocab_size,
        fields=fields,
    )
    answer = _ChatCompletion(service, body, params, prompt, parted)
    # From here on something runs, which only the answer ends.
    generation = await service.begin(
        [prompt], params, body.priority or 0, fields, salt_of(body), keeps=not body.stream
    )
    if body.stream:
        interval = service.settings.sse_keep_alive_interval
        return EventStream(_events(answer, generation, include_usage), generation, interval)
    return WholeAnswer(_whole(answer, generation), generation)


async def encode_messages(
    service: Service,
    messages: Messages,
    *,
    add_generation_prompt: bool,
    template_options: dict[str, object] | None,
    add_special_tokens: bool,
) -> list[int]:
    """Token ids of a conversation. Raises ApiError if the template refuses it."""
    engine = service.ready()
    loop = asyncio.get_running_loop()
    try:
        text = await loop.run_in_executor(
            _RENDERING,
            render_conversation,
            messages,
            engine.tokenizer,
            engine.card.max_model_len,
            add_generation_prompt,
            template_options or {},
        )
    except ConversationError as error:
        code = "context_length_exceeded" if error.too_long else None
        raise ApiError(400, str(error), param=error.field, code=code) from error
    except UsageError as error:
        raise ApiError(400, str(error), param="messages") from error
    return await service.encode(text, add_special_tokens, "messages")


class _ChatCompletion:
    """What is the same in all parts of an answer, and how its parts are made."""

    def __init__(
        self,
        service: Service,
        body: ChatBody,
        params: SamplingParams,
        prompt: list[int],
        parted: bool,
    ) -> None:
        """parted: texts are in harmony."""
        self.params = params
        self.prompt = prompt
        # By choice.
        self._harmony = [HarmonyText() for _ in range(params.n)] if parted else None
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = body.model or service.model_name
        self._body = body
        self._reader = service.ready().reader
        self._writing = service.writing

    def chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        of_prompt: PromptLogprobs | UnsetType = UNSET,
    ) -> bytes:
        return _encode(
            ChatChunk(
                self.id,
                "chat.completion.chunk",
                self.created,
                self.model,
                choices,
                usage,
                of_prompt,
            )
        )

    def message(self, index: int, text: str) -> AnswerMessage:
        """Of a choice's whole text."""
        if self._harmony is None:
            return AnswerMessage("assistant", text)
        reasoning, content = self._harmony[index].push(text, last=True)
        said = content if content or not reasoning else None
        return AnswerMessage("assistant", said, reasoning_content=reasoning or None)

    def deltas(self, index: int, text: str, *, last: bool) -> list[ChatDelta]:
        """Of a choice's next piece of text, one at least."""
        if self._harmony is None:
            return [ChatDelta(text)]
        reasoning, content = self._harmony[index].push(text, last=last)
        if not reasoning:
            return [ChatDelta(content)]
        thought = ChatDelta(reasoning_content=reasoning)
        return [thought, ChatDelta(content)] if content else [thought]

    async def logprobs(self, tokens: list[tuple[int, TokenLogprobs]]) -> Pieces:
        """ChatLogprobs, or null unless they are asked for."""
        if not self._body.logprobs:
            return [b"null"]
        work = chat_logprobs(
            tokens,
            self._body.top_logprobs or 0,
            bool(self._body.return_tokens_as_token_ids),
            self._reader,
        )
        return await in_turns(work, self._writing)

    async def report(self, choices: Choices) -> Pieces:
        """PromptLogprobs."""
        return await in_turns(prompt_logprobs(choices.reports[0], self._reader), self._writing)


async def _whole(answer: _ChatCompletion, generation: Generation) -> Pieces:
    choices = Choices([answer.prompt], answer.params)
    async for number, deltas in generation:
        choices.add(number, deltas)
    all_of_them: Pieces = []
    for index, choice in enumerate(choices.of(0)):
        text, tokens = choice.take()
        message = answer.message(index, text)
        written = _encode(
            ChatChoice(index, message, LATER, choice.finish_reason, choice.stop_reason)
        )
        if all_of_them:
            all_of_them.append(b",")
        all_of_them += fill(written, await answer.logprobs(tokens))
        await asyncio.sleep(0)
    later = [all_of_them]
    reported = answer.params.prompt_logprobs is not None
    if reported:
        later.append(await answer.report(choices))
    chat = Chat(
        answer.id,
        "chat.completion",
        answer.created,
        answer.model,
        [LATER],
        choices.count.usage(),
        LATER if reported else UNSET,
    )
    return fill(_encode(chat), *later)


async def _events(
    answer: _ChatCompletion, generation: Generation, include_usage: bool
) -> AsyncGenerator[Pieces, None]:
    no_usage = None if include_usage else UNSET
    choices = Choices([answer.prompt], answer.params)
    report_due = answer.params.prompt_logprobs is not None
    async for number, deltas in generation:
        choices.add(number, deltas)
        if report_due and choices.is_reported(0):
            report_due = False
            yield fill(answer.chunk([], no_usage, LATER), await answer.report(choices))
        for index in choices.take_news(0):
            choice = choices.of(0)[index]
            if not choice.begun:
                # Not before its first token: load generators take it for that.
                choice.begun = True
                first = ChatChunkChoice(index, ChatDelta("", "assistant"), None, None)
                yield [answer.chunk([first], no_usage)]
            text, tokens = choice.take()
            reason = choice.finish_reason
            stop_reason = choice.stop_reason if reason else UNSET
            *before, delta = answer.deltas(index, text, last=reason is not None)
            for thought in before:
                yield [answer.chunk([ChatChunkChoice(index, thought, None, None)], no_usage)]
            piece = ChatChunkChoice(index, delta, LATER, reason, stop_reason)
            yield fill(answer.chunk([piece], no_usage), await answer.logprobs(tokens))
    if include_usage:
        yield [answer.chunk([], choices.count.usage())]
