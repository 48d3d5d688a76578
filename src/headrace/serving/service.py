"""What all endpoints share: the engine once it is there, who may enter, and what runs."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence

from headrace.async_llm import AsyncLLM
from headrace.engine.outputs import OutputDelta
from headrace.engine.request import FinishReason as EngineFinishReason
from headrace.engine_thread import Submission
from headrace.errors import HeadraceError, UsageError
from headrace.protocol.sampling_params import SamplingParams
from headrace.serving.errors import ApiError, as_api_error
from headrace.serving.metrics import ServerMetrics
from headrace.serving.responses import FinishReason
from headrace.serving.settings import ServerSettings

_log = logging.getLogger(__name__)

# Texts longer than this are tokenized beside the event loop: the others go on meanwhile.
_LONG_TEXT = 20_000


class Service:
    """The state of the server. engine: None while it loads."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.model_name = settings.served_model_names[0]
        self.metrics = ServerMetrics(self.model_name)
        self.started_at = int(time.time())
        self.engine: AsyncLLM | None = None
        self.draining = False
        # Completions that have not ended, of all requests.
        self._open = 0
        # Set while no request is being answered.
        self.quiet = asyncio.Event()
        self.quiet.set()

    def attach(self, engine: AsyncLLM) -> None:
        """The engine has loaded: requests are let in."""
        self.engine = engine
        tokenizer = engine.running.tokenizer
        self._longest_token = tokenizer.longest_token
        self.metrics.attach(engine.running)

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
            raise ApiError(503, f"the engine has ended: {self.engine.error}")
        return self.engine

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
        queue, slots = self.settings.max_queued_requests, self.ready().config.sequences
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
        running = self.ready().running
        encode = running.tokenizer.encode
        if len(text) > running.max_model_len * self._longest_token:
            raise ApiError(
                400,
                f"{field}: {len(text)} characters do not fit into the {running.max_model_len} "
                "tokens that a sequence may have (--max-model-len)",
                param=field,
                code="context_length_exceeded",
            )
        try:
            if len(text) > _LONG_TEXT:
                return await asyncio.to_thread(encode, text, add_special_tokens)
            # Others have their turn between the prompts of one request.
            await asyncio.sleep(0)
            return encode(text, add_special_tokens)
        except UsageError as error:
            raise ApiError(400, f"{field}: {error}", param=field) from error

    async def offsets(self, text: str, add_special_tokens: bool) -> list[int]:
        """Where the tokens of a text that was encoded begin in it."""
        offsets = self.ready().running.tokenizer.offsets
        if len(text) > _LONG_TEXT:
            return await asyncio.to_thread(offsets, text, add_special_tokens)
        return offsets(text, add_special_tokens)

    async def begin(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        priority: int,
        fields: Mapping[str, str],
        salt: bytes,
    ) -> "Generation":
        """Have the engine take prompts on; close() what this gives, whatever happens.

        fields: SamplingParams' names, with what the request calls them. salt: of the prefix cache.
        Raises ApiError.
        """
        engine = self.ready()
        self.check_count(len(prompts), params.n, fields)
        count = params.n * len(prompts)
        if self._open + count > engine.config.sequences + self.settings.max_queued_requests:
            raise ApiError(
                429, f"{self._open} completions run or wait already: try again later",
                code="queue_full",
            )  # fmt: skip
        self._open += count
        self.quiet.clear()
        try:
            submission = await engine.submit(prompts, params, priority=priority, salt=salt)
        except BaseException as error:
            self.leave(count)
            if isinstance(error, HeadraceError):
                raise as_api_error(error, fields) from error
            raise
        return Generation(self, submission, count)

    def leave(self, count: int) -> None:
        """So many completions have ended, and their answers were sent."""
        self._open -= count
        if not self._open:
            self.quiet.set()


class Generation:
    """Prompts that run. Iterating gives (prompt's number, its new deltas). Raises ApiError."""

    def __init__(self, service: Service, submission: Submission, count: int) -> None:
        self._count = count
        self._service = service
        self._submission = submission
        self._watches = [
            service.metrics.begin(len(request.prompt), submission.params)
            for request in submission.requests
        ]
        self._open = True
        self._timeout: ApiError | None = None
        limit = service.settings.request_timeout
        self._timer = None
        if limit is not None:
            self._timer = asyncio.get_running_loop().call_later(limit, self._expire, limit)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Sequence[OutputDelta]]]:
        try:
            async for number, deltas in self._submission:
                self._watches[number].take(deltas)
                if any(delta.finish_reason == "abort" for delta in deltas):
                    raise self._timeout or ApiError(
                        503, "the server is shutting down: the answer was cut"
                    )
                yield number, deltas
        except HeadraceError as error:
            raise as_api_error(error) from error

    def close(self) -> None:
        """End what still runs; may be called again."""
        if self._open:
            self._open = False
            if self._timer is not None:
                self._timer.cancel()
            self._submission.abort()
            for watch in self._watches:
                watch.close()
            self._service.leave(self._count)

    def _expire(self, limit: float) -> None:
        self._timeout = ApiError(
            408,
            f"the answer was not complete within {limit:g} s (--request-timeout)",
            # OpenAI's clients look for it: they would have all of it computed again.
            headers={"x-should-retry": "false"},
        )
        self._submission.abort()


def finish_reason(reason: EngineFinishReason | None) -> FinishReason | None:
    """As the API has it. Aborted completions are not shown: a Generation raises for them."""
    assert reason != "abort"
    return reason
