"""What all endpoints share: the engine once it is there, who may enter, and what runs."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType

from headrace.async_llm import AsyncLLM
from headrace.engine.outputs import OutputDelta
from headrace.engine_thread import Submission
from headrace.errors import HeadraceError, UsageError
from headrace.sampling_params import SamplingParams
from headrace.serving.api_errors import ApiError, as_api_error
from headrace.serving.backlog import (
    MOST_HELD_BYTES,
    Backlog,
    content_bytes,
    delta_bytes,
    report_bytes,
)
from headrace.serving.metrics import ServerMetrics
from headrace.serving.settings import ServerSettings

_log = logging.getLogger(__name__)

# Texts longer than this are tokenized beside the event loop: the others go on meanwhile. Shorter
# ones take two milliseconds at most.
_LONG_TEXT = 2000


class Service:
    """The state of the server. engine: None while it loads."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.model_name = settings.served_model_names[0]
        self.metrics = ServerMetrics(self.model_name)
        self.started_at = int(time.time())
        self.engine: AsyncLLM | None = None
        self.draining = False
        self.backlog = Backlog(MOST_HELD_BYTES, self.metrics.cut)
        # Large reports are written one after the other: each piece of one takes its turn in the
        # event loop, and together they would take all of them.
        self.writing = asyncio.Lock()
        # As with reports: one short text of all requests is tokenized before others have a turn.
        self._tokenizing = asyncio.Lock()
        # Completions that run or wait, of all requests.
        self._open = 0
        self._answering = 0
        # Set while no request is being answered.
        self.quiet = asyncio.Event()
        self.quiet.set()

    def attach(self, engine: AsyncLLM) -> None:
        """The engine has loaded: requests are let in."""
        self.engine = engine
        self._longest_token = engine.tokenizer.longest_token
        self.metrics.attach(engine.card, lambda: engine.snapshot, lambda: engine.recovery)

    def ready(self) -> AsyncLLM:
        """The engine. Raises ApiError while it loads, when it is broken and when it drains."""
        if self.draining:
            raise ApiError(
                503,
                "the server is shutting down: no new requests are taken",
                # Or a proxy would keep the connection, and use it for the next.
                headers={"connection": "close"},
            )
        if self.engine is None:
            raise ApiError(503, "the model is still loading: try again in a moment")
        if self.engine.error is not None:
            raise self._ended(self.engine.error)
        return self.engine

    def told(
        self, error: HeadraceError, fields: Mapping[str, str] = MappingProxyType({})
    ) -> ApiError:
        """How a client is told of an error of the engine's, which may be that it has ended. fields:
        as in as_api_error()."""
        if self.engine is not None and self.engine.error is not None:
            return self._ended(self.engine.error)
        return as_api_error(error, fields)

    def _ended(self, reason: HeadraceError) -> ApiError:
        return ApiError(503, f"the engine has ended: {reason}")

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served; None or no name mean the one that is."""
        if name and name not in self.settings.served_model_names:
            raise ApiError(
                404,
                f"the model {name[:100]!r} does not exist: this server has "
                f"{', '.join(self.settings.served_model_names)}",
                param="model",
                code="model_not_found",
            )

    def check_count(self, prompts: int, n: int, fields: Mapping[str, str]) -> None:
        """Raises ApiError for more completions in one request than may ever run and wait."""
        queue, slots = self.settings.max_queued_requests, self.ready().card.max_num_seqs
        if prompts * n > slots + queue:
            field = fields["n"] if n > 1 else "prompt"
            raise ApiError(
                400,
                f"{field} asks for {prompts * n} completions in all, more than the {slots} that "
                f"may run and the {queue} that may wait (--max-queued-requests)",
                param=field,
            )

    async def encode(self, text: str, add_special_tokens: bool, field: str) -> list[int]:
        """Token ids of a text. Raises ApiError naming the field if it is no valid Unicode, or too
        long whatever its tokens are."""
        engine = self.ready()
        encode, limit = engine.tokenizer.encode, engine.card.max_model_len
        if len(text) > limit * self._longest_token:
            raise ApiError(
                400,
                f"{field}: {len(text)} characters do not fit into the {limit} "
                "tokens that a sequence may have (--max-model-len)",
                param=field,
                code="context_length_exceeded",
            )
        try:
            return await self._tokenized(encode, text, add_special_tokens)
        except UsageError as error:
            raise ApiError(400, f"{field}: {error}", param=field) from error

    async def offsets(self, text: str, add_special_tokens: bool) -> list[int]:
        """Where the tokens of a text that was encoded begin in it."""
        offsets = self.ready().tokenizer.offsets
        return await self._tokenized(offsets, text, add_special_tokens)

    async def _tokenized(
        self, work: Callable[[str, bool], list[int]], text: str, add_special_tokens: bool
    ) -> list[int]:
        if len(text) > _LONG_TEXT:
            return await asyncio.to_thread(work, text, add_special_tokens)
        async with self._tokenizing:
            await asyncio.sleep(0)
            return work(text, add_special_tokens)

    async def begin(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        priority: int,
        fields: Mapping[str, str],
        salt: bytes,
        *,
        keeps: bool,
    ) -> "Generation":
        """Have the engine take prompts on; close() what this gives, whatever happens.

        fields: SamplingParams' names, with what the request calls them. salt: of the prefix cache.
        keeps: nothing is sent before all of it is there. Raises ApiError.
        """
        engine = self.ready()
        self.check_count(len(prompts), params.n, fields)
        count = params.n * len(prompts)
        if self._open + count > engine.card.max_num_seqs + self.settings.max_queued_requests:
            raise ApiError(
                429, f"{self._open} completions run or wait already: try again later",
                code="queue_full",
            )  # fmt: skip
        generation = Generation(self, prompts, params, keeps)
        try:
            submission = await engine.submit(
                prompts, params, priority=priority, salt=salt, on_arrival=generation.arrived
            )
        except BaseException as error:
            generation.refuse()
            if isinstance(error, HeadraceError):
                raise self.told(error, fields) from error
            raise
        generation.attach(submission)
        return generation

    def enter(self, count: int) -> None:
        """An answer with so many completions begins."""
        self._open += count
        self._answering += 1
        self.quiet.clear()

    def give_back(self, count: int) -> None:
        """The engine is done with so many completions, whether or not they were read."""
        self._open -= count

    def leave(self) -> None:
        """An answer is on its way, or will never be."""
        self._answering -= 1
        if not self._answering:
            self.quiet.set()


class Generation:
    """Prompts that run, and their answer's part in what is counted.

    Iterating gives (prompt's number, its new deltas). Raises ApiError. Its places belong to what
    runs: they are given back when the engine is done. held: bytes of it that nobody has read.
    cut_connection: set once the status was sent, when an error can no longer be told.
    """

    def __init__(
        self, service: Service, prompts: list[list[int]], params: SamplingParams, keeps: bool
    ) -> None:
        self._places = self._unfinished = params.n * len(prompts)
        self._service = service
        self._keeps = keeps
        self._submission: Submission | None = None
        self._watches = [service.metrics.begin(len(prompt), params) for prompt in prompts]
        self._open = True
        self._ended_by: ApiError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.held = service.backlog.open(self._cut)
        self.cut_connection: Callable[[], None] | None = None
        service.enter(self._places)

    def attach(self, submission: Submission) -> None:
        """The engine has taken the prompts on."""
        self._submission = submission
        limit = self._service.settings.request_timeout
        if limit is not None:
            self._timer = asyncio.get_running_loop().call_later(limit, self._expire, limit)

    def arrived(self, number: int, deltas: list[OutputDelta]) -> None:
        """The engine has these for the prompt of this number."""
        self._watches[number].take(deltas)
        if not self._open:
            return
        self._unfinished -= sum(delta.finish_reason is not None for delta in deltas)
        if not self._unfinished:
            self._give_back()
        self.held.add(delta_bytes(deltas) + content_bytes(deltas) + report_bytes(deltas))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Sequence[OutputDelta]]]:
        assert self._submission is not None
        try:
            async for number, deltas in self._submission:
                if any(delta.finish_reason == "abort" for delta in deltas):
                    raise self._ended_by or ApiError(
                        503, "the server is shutting down: the answer was cut"
                    )
                for delta in deltas:
                    if delta.finish_reason == "error":
                        raise ApiError(500, str(delta.stop_reason))
                yield number, deltas
                # Reports are shown to each choice.
                kept = content_bytes(deltas) if self._keeps else 0
                self.held.add(kept - delta_bytes(deltas) - content_bytes(deltas))
        except HeadraceError as error:
            raise self._service.told(error) from error

    def close(self) -> None:
        """End what still runs; may be called again."""
        if self._open:
            self._open = False
            if self._timer is not None:
                self._timer.cancel()
            if self._submission is not None:
                self._submission.abort()
            for watch in self._watches:
                watch.close()
            self.refuse()

    def refuse(self) -> None:
        """Nothing runs of it."""
        self._open = False
        self.held.close()
        self._give_back()
        self._service.leave()

    def check_not_cut(self) -> None:
        """Raises ApiError if it was ended before its answer was ready to be sent."""
        if self._ended_by is not None:
            raise self._ended_by

    def _give_back(self) -> None:
        self._service.give_back(self._places)
        self._places = 0

    def _cut(self) -> None:
        """Its reader leaves too much unread."""
        self._end(
            ApiError(
                503,
                "the answer was cut: more answers wait to be read than there is memory for; read "
                "faster, or ask for less at once",
            )
        )
        if self.cut_connection is not None:
            self.cut_connection()

    def _end(self, reason: ApiError) -> None:
        self._ended_by = reason
        if self._submission is not None:
            self._submission.abort()

    def _expire(self, limit: float) -> None:
        error = ApiError(
            408,
            f"the answer was not complete within {limit:g} s (--request-timeout)",
            # OpenAI's clients look for it: they would have all of it computed again.
            headers={"x-should-retry": "false"},
        )
        self._end(error)
