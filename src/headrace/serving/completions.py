"""/v1/completions: continues prompts."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from headrace.engine.detokenizer import Detokenizer
from headrace.engine.engine import Engine
from headrace.engine.outputs import (
    CompletionOutput,
    Logprobs,
    OutputDelta,
    OutputGatherer,
    RequestOutput,
)
from headrace.protocol.sampling_params import SamplingParams
from headrace.serving.answers import EventStream, WholeAnswer
from headrace.serving.errors import ApiError
from headrace.serving.logprobs import TextOffsets, completion_logprobs, prompt_logprobs
from headrace.serving.requests import CompletionBody
from headrace.serving.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
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

_FIELDS = {name: name for name in CompletionBody.__struct_fields__}
# A token, how it reads, where it begins in the text, and the log-probabilities of its place.
_Token = tuple[int, str, int, Logprobs | None]


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
        defaults=engine.running.sampling_defaults,
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
            engine.running.max_model_len,
            prompt_field="prompt",
            field="max_tokens",
        )
        prompts.append(text_or_ids)
    answer = _Answer(
        body,
        body.model or service.model_name,
        engine.running.engine,
        n,
        params,
        shown,
        prompts,
    )
    # From here on something runs, which only the answer ends.
    generation = await service.begin(prompts, params, body.priority or 0, fields, salt_of(body))
    if body.stream:
        return EventStream(_events(answer, generation, include_usage), generation.close)
    return WholeAnswer(_whole(answer, generation), generation.close)


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


def _decoded(prompt: list[int], reader: Detokenizer, complete: bool) -> _ShownPrompt:
    """Token ids as a text, with special tokens. complete: no answer follows, which a character
    that the prompt begins would belong to."""
    stream = reader.stream()
    text = "".join(map(stream.push, prompt))
    beginnings = TextOffsets(reader.stream(), 0)
    offsets = [beginnings.next(token, reader.text_of(token)) for token in prompt]
    return _ShownPrompt(text + stream.finish() if complete else text, offsets)


class _Answer:
    """What is the same in all parts of an answer, and how its parts are made."""

    def __init__(
        self,
        body: CompletionBody,
        model: str,
        engine: Engine,
        n: int,
        params: SamplingParams,
        shown: dict[int, _ShownPrompt],
        prompts: list[list[int]],
    ) -> None:
        self.engine = engine
        self.body = body
        self.n = n
        self.params = params
        self._shown = shown
        self.prompts = prompts
        self.as_ids = bool(body.return_tokens_as_token_ids)
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model

    def wrap(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        kind: Literal["text_completion"] = "text_completion"
        return Completion(self.id, kind, self.created, self.model, choices, usage)

    def shown(self, number: int) -> _ShownPrompt:
        """What echo shows of a prompt that runs: token ids may be none before."""
        if number not in self._shown:
            complete = self.body.max_tokens == 0
            self._shown[number] = _decoded(self.prompts[number], self.engine.reader, complete)
        return self._shown[number]

    def prompt_tokens(self, number: int, entries: Sequence[Logprobs | None]) -> list[_Token]:
        tokens, offsets = self.prompts[number], self.shown(number).offsets
        text_of = self.engine.reader.text_of
        return [
            (token, text_of(token), offset, entry)
            for token, offset, entry in zip(tokens, offsets, entries, strict=True)
        ]

    def offsets_after(self, number: int) -> TextOffsets:
        """Where the tokens of an answer to a prompt begin in what is shown."""
        before = len(self.shown(number).text) if self.body.echo else 0
        return TextOffsets(self.engine.detokenizer.stream(self.prompts[number]), before)

    def tokens(
        self, offsets: TextOffsets, ids: Sequence[int], logprobs: Sequence[Logprobs]
    ) -> list[_Token]:
        """The next tokens of an answer."""
        text_of = self.engine.reader.text_of
        return [
            (token, reading, offsets.next(token, reading), entries)
            for token, entries in zip(ids, logprobs, strict=True)
            for reading in [text_of(token)]
        ]

    def logprobs_of(self, tokens: list[_Token]) -> CompletionLogprobs | None:
        """None unless they are asked for."""
        if self.body.logprobs is None:
            return None
        return completion_logprobs(tokens, self.as_ids)


async def _whole(answer: _Answer, generation: Generation) -> Completion:
    gatherers = [OutputGatherer("", None, prompt, answer.params) for prompt in answer.prompts]
    count = TokenCount(answer.prompts)
    async for number, deltas in generation:
        count.take(number, deltas)
        for delta in deltas:
            gatherers[number].take(delta)
    choices = []
    for number, gatherer in enumerate(gatherers):
        output = gatherer.output()
        for index, completion in enumerate(_best(output.outputs, answer.n)):
            choices.append(_choice(answer, number, output, completion, number * answer.n + index))
    nothing_asked = answer.body.max_tokens == 0
    return answer.wrap(choices, count.usage(0 if nothing_asked else None))


def _best(completions: list[CompletionOutput], n: int) -> list[CompletionOutput]:
    """Those with the highest log-probability a token."""
    if n == len(completions):
        return completions

    def mean_logprob(completion: CompletionOutput) -> float:
        return (completion.cumulative_logprob or 0.0) / max(1, len(completion.token_ids))

    return sorted(completions, key=mean_logprob, reverse=True)[:n]


def _choice(
    answer: _Answer, number: int, output: RequestOutput, completion: CompletionOutput, index: int
) -> CompletionChoice:
    body = answer.body
    text = completion.text
    tokens: list[_Token] = []
    if body.logprobs is not None and completion.logprobs is not None:
        offsets = answer.offsets_after(number)
        tokens = answer.tokens(offsets, completion.token_ids, completion.logprobs)
    reason, stop_reason = finish_reason(completion.finish_reason), completion.stop_reason
    if body.max_tokens == 0:
        text, tokens, reason, stop_reason = "", [], "length", None
    if body.echo:
        text = answer.shown(number).text + text
        if body.logprobs is not None:
            tokens = answer.prompt_tokens(number, output.prompt_logprobs or ()) + tokens
    shown: PromptLogprobs | UnsetType = UNSET
    if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
        shown = prompt_logprobs(output.prompt_logprobs)
    return CompletionChoice(
        index,
        text,
        answer.logprobs_of(tokens),
        reason,
        stop_reason,
        shown,
    )


@dataclass
class _Progress:
    """How far one choice's stream has come. offsets: where its tokens begin, if that is asked for.
    held: what has to wait for the log-probabilities of the prompt, which come with the first
    completion."""

    begun: bool = False
    offsets: TextOffsets | None = None
    held: list[OutputDelta] = field(default_factory=list)


async def _events(
    answer: _Answer, generation: Generation, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    body, n = answer.body, answer.n
    encode = msgspec.json.Encoder().encode
    no_usage = None if include_usage else UNSET
    count = TokenCount(answer.prompts)
    progress = [_Progress() for _ in range(n * len(answer.prompts))]
    of_prompt: list[list[Logprobs | None]] = [[None] for _ in answer.prompts]
    # Of each prompt the choices that hold something, in the order in which it came.
    ready: list[dict[int, None]] = [{} for _ in answer.prompts]
    prompt_logprobs_wanted = answer.params.prompt_logprobs is not None
    async for number, deltas in generation:
        count.take(number, deltas)
        for delta in deltas:
            if delta.prompt_logprobs:
                of_prompt[number] += delta.prompt_logprobs
            if delta.token is not None or delta.finish_reason is not None:
                place = number * n + delta.index
                progress[place].held.append(delta)
                ready[number][place] = None
        if prompt_logprobs_wanted and len(of_prompt[number]) < len(answer.prompts[number]):
            continue
        for place in ready[number]:
            choice = _piece(answer, number, place, progress[place], of_prompt[number])
            yield encode(answer.wrap([choice], no_usage))
        ready[number].clear()
    if include_usage:
        yield encode(answer.wrap([], count.usage(0 if body.max_tokens == 0 else None)))


def _piece(
    answer: _Answer,
    number: int,
    place: int,
    progress: _Progress,
    of_prompt: list[Logprobs | None],
) -> CompletionChoice:
    """What the deltas that one completion holds add to its text."""
    body = answer.body
    deltas, progress.held = progress.held, []
    text = "".join([delta.text for delta in deltas])
    tokens: list[_Token] = []
    if body.logprobs is not None:
        progress.offsets = progress.offsets or answer.offsets_after(number)
        for delta in deltas:
            if delta.token is not None and delta.logprobs is not None:
                tokens += answer.tokens(progress.offsets, [delta.token], [delta.logprobs])
    last = deltas[-1]
    reason, stop_reason = finish_reason(last.finish_reason), last.stop_reason
    if body.max_tokens == 0:
        text, tokens, reason, stop_reason = "", [], "length", None
    shown: PromptLogprobs | UnsetType = UNSET
    if not progress.begun:
        progress.begun = True
        if body.echo:
            text = answer.shown(number).text + text
            if body.logprobs is not None:
                tokens = answer.prompt_tokens(number, of_prompt) + tokens
        if body.prompt_logprobs is not None:
            shown = prompt_logprobs(of_prompt)
    return CompletionChoice(place, text, answer.logprobs_of(tokens), reason, stop_reason, shown)
