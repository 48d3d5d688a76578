"""/v1/completions: continues prompts."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from headrace.engine.detokenizer import Detokenizer, TextStream
from headrace.protocol.messages import TokenLogprobs
from headrace.sampling_params import SamplingParams
from headrace.serving.answer_size import check_answer_size
from headrace.serving.answers import EventStream, WholeAnswer
from headrace.serving.api_errors import ApiError
from headrace.serving.choices import Choice, Choices
from headrace.serving.engine_request import (
    check_room,
    check_stream_options,
    salt_of,
    sampling_params,
)
from headrace.serving.logprobs import (
    CompletionColumns,
    TextOffsets,
    completion_columns,
    completion_logprobs,
    prompt_logprobs,
)
from headrace.serving.pieces import LATER, Pieces, Work, fill, in_turns
from headrace.serving.requests import CompletionBody
from headrace.serving.responses import Completion, CompletionChoice, Usage
from headrace.serving.service import Generation, Service

_FIELDS = {name: name for name in CompletionBody.__struct_fields__}

# Tokens of a prompt that are turned into text in one part: a few milliseconds.
_TOKENS_AT_ONCE = 1000

_encode = msgspec.json.Encoder().encode


async def complete(service: Service, body: CompletionBody) -> Response:
    """Answer a request, whole or as a stream. Raises ApiError."""
    engine = service.ready()
    service.check_model(body.model)
    include_usage = check_stream_options(body)
    texts_or_ids = _prompts(body.prompt)
    max_tokens = body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens may be 0 only with echo", param="max_tokens")
    n = body.n or 1
    best_of = body.best_of or n
    if best_of < n:
        raise ApiError(400, f"best_of must be at least n ({n}), not {best_of}", param="best_of")
    if best_of > n and body.stream:
        raise ApiError(400, "best_of cannot be streamed: leave stream out", param="best_of")
    fields = {**_FIELDS, "n": "best_of"} if best_of > n else _FIELDS
    params = sampling_params(
        body,
        fields,
        n=best_of,
        max_tokens=1 if max_tokens == 0 else max_tokens,
        # What best_of ranks by.
        logprobs=0 if body.logprobs is None and best_of > n else body.logprobs,
        defaults=engine.card.sampling_defaults,
    )
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = msgspec.structs.replace(params, prompt_logprobs=body.logprobs)
    special = body.add_special_tokens is not False
    # Before many prompts are tokenized in vain.
    service.check_count(len(texts_or_ids), params.n, fields)
    prompts = []
    shown: dict[int, _ShownPrompt] = {}
    for number, text_or_ids in enumerate(texts_or_ids):
        if isinstance(text_or_ids, str):
            text = text_or_ids
            text_or_ids = await service.encode(text, special, "prompt")
            asked = body.echo and body.logprobs is not None
            offsets = await service.offsets(text, special) if asked else []
            shown[number] = _ShownPrompt(text, offsets)
        check_room(
            len(text_or_ids),
            max_tokens,
            engine.card.max_model_len,
            prompt_field="prompt",
            field="max_tokens",
        )
        prompts.append(text_or_ids)
    check_answer_size(
        prompts,
        params,
        report_shown=params.n
        * ((body.prompt_logprobs is not None) + bool(body.echo and body.logprobs is not None)),
        echoed=bool(body.echo and body.logprobs is None),
        max_model_len=engine.card.max_model_len,
        vocab_size=engine.card.vocab_size,
        fields=fields
        if body.prompt_logprobs is not None
        else {**fields, "prompt_logprobs": fields["logprobs"]},
    )
    answer = _TextCompletion(service, body, params, shown, prompts)
    # From here on something runs, which only the answer ends.
    generation = await service.begin(
        prompts, params, body.priority or 0, fields, salt_of(body), keeps=not body.stream
    )
    if body.stream:
        interval = service.settings.sse_keep_alive_interval
        return EventStream(_events(answer, generation, include_usage), generation, interval)
    return WholeAnswer(_whole(answer, generation), generation)


def _prompts(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Each prompt, a text or token ids. Raises ApiError for a mixture of prompts and ids."""
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    prompts = [item for item in given if not isinstance(item, int)]
    if bool(ids) == bool(prompts):
        problem = "mixes token ids with prompts" if ids else "is empty"
        raise ApiError(
            400, f"prompt {problem}: give a text, token ids, or a list of either", param="prompt"
        )
    return prompts or [ids]


@dataclass(frozen=True)
class _ShownPrompt:
    """What echo shows of a prompt. offsets: where its tokens begin there, if that is asked for."""

    text: str
    offsets: list[int]


def _decoded(prompt: list[int], reader: Detokenizer, complete: bool) -> Work[_ShownPrompt]:
    """Token ids as a text, with special tokens. complete: no answer follows, which a character
    that the prompt begins would belong to."""
    stream = reader.stream()
    beginnings = TextOffsets(reader.stream(), 0)
    texts, offsets = [], []
    for place, token in enumerate(prompt, start=1):
        texts.append(stream.push(token))
        offsets.append(beginnings.next(token, reader.text_of(token)))
        if place % _TOKENS_AT_ONCE == 0:
            yield
    return _ShownPrompt("".join(texts) + (stream.finish() if complete else ""), offsets)


class _TextCompletion:
    """What is the same in all parts of an answer, and how its parts are made.

    shown: the prompts that were given as texts, by number.
    """

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        params: SamplingParams,
        shown: dict[int, _ShownPrompt],
        prompts: list[list[int]],
    ) -> None:
        engine = service.ready()
        self.body = body
        self.params = params
        self.prompts = prompts
        self.n = body.n or 1
        self._shown = shown
        self._detokenizer = engine.detokenizer
        self._reader = engine.reader
        self._writing = service.writing
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = body.model or service.model_name
        # By the prompt's number, since all its choices show the same.
        self._columns: dict[int, CompletionColumns] = {}
        self._reports: dict[int, Pieces] = {}
        self._streams: dict[int, TextStream] = {}

    def wrap(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        kind: Literal["text_completion"] = "text_completion"
        return _encode(Completion(self._id, kind, self._created, self._model, choices, usage))

    def usage(self, choices: Choices) -> Usage:
        """What was asked for: with max_tokens 0 a token is computed all the same."""
        return choices.count.usage(0 if self.body.max_tokens == 0 else None)

    async def write(self, choices: Choices, number: int, index: int, choice: Choice) -> Pieces:
        """A CompletionChoice: what came of one since the last time."""
        body = self.body
        text, tokens = choice.take()
        reason, stop_reason = choice.finish_reason, choice.stop_reason
        if body.max_tokens == 0:
            text, tokens, reason, stop_reason = "", [], "length", None
        begins, choice.begun = not choice.begun, True
        shown = await self._shown_prompt(number) if body.echo else _ShownPrompt("", [])
        if begins:
            text = shown.text + text
        written = CompletionChoice(number * self.n + index, text, None, reason, stop_reason)
        later = []
        if body.logprobs is not None:
            written.logprobs = LATER
            columns = []
            if begins and body.echo:
                columns.append(await self._prompt_columns(number, choices.reports[number]))
            if choice.offsets is None:
                choice.offsets = TextOffsets(self._begun(number).copy(), len(shown.text))
            work = completion_columns(tokens, choice.offsets.next, self._as_ids, self._reader)
            columns.append(await in_turns(work, self._writing))
            later.append(completion_logprobs(columns))
        if begins and body.prompt_logprobs is not None:
            written.prompt_logprobs = LATER
            later.append(await self._report(number, choices.reports[number]))
        return fill(_encode(written), *later)

    async def _shown_prompt(self, number: int) -> _ShownPrompt:
        """What echo shows of a prompt that runs: token ids may be none before."""
        if number not in self._shown:
            work = _decoded(self.prompts[number], self._reader, self.body.max_tokens == 0)
            self._shown[number] = await in_turns(work, self._writing)
        return self._shown[number]

    async def _prompt_columns(self, number: int, report: list[TokenLogprobs]) -> CompletionColumns:
        if number not in self._columns:
            tokens = list(zip(self.prompts[number], [None, *report], strict=True))
            offsets = iter((await self._shown_prompt(number)).offsets)
            work = completion_columns(tokens, lambda *_: next(offsets), self._as_ids, self._reader)
            self._columns[number] = await in_turns(work, self._writing)
        return self._columns[number]

    def _begun(self, number: int) -> TextStream:
        """A stream at the end of a prompt."""
        if number not in self._streams:
            self._streams[number] = self._detokenizer.stream(self.prompts[number])
        return self._streams[number]

    async def _report(self, number: int, report: list[TokenLogprobs]) -> Pieces:
        if number not in self._reports:
            work = prompt_logprobs(report, self._reader)
            self._reports[number] = await in_turns(work, self._writing)
        return self._reports[number]


async def _whole(answer: _TextCompletion, generation: Generation) -> Pieces:
    choices = Choices(answer.prompts, answer.params)
    async for number, deltas in generation:
        choices.add(number, deltas)
    all_of_them: Pieces = []
    for number in range(len(answer.prompts)):
        best = choices.of(number)
        if len(best) > answer.n:
            best = sorted(best, key=lambda choice: choice.mean_logprob, reverse=True)[: answer.n]
        for index, choice in enumerate(best):
            if all_of_them:
                all_of_them.append(b",")
            all_of_them += await answer.write(choices, number, index, choice)
            await asyncio.sleep(0)
    return fill(answer.wrap([LATER], answer.usage(choices)), all_of_them)


async def _events(
    answer: _TextCompletion, generation: Generation, include_usage: bool
) -> AsyncGenerator[Pieces, None]:
    no_usage = None if include_usage else UNSET
    choices = Choices(answer.prompts, answer.params)
    async for number, deltas in generation:
        choices.add(number, deltas)
        if not choices.is_reported(number):
            continue
        for index in choices.take_news(number):
            written = await answer.write(choices, number, index, choices.of(number)[index])
            yield fill(answer.wrap([LATER], no_usage), written)
    if include_usage:
        yield [answer.wrap([], answer.usage(choices))]
