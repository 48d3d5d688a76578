"""What all endpoints share: the engine once it is there, who may enter, and what runs."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from headrace.async_llm import AsyncLLM
from headrace.engine.outputs import OutputDelta
from headrace.engine_thread import Submission
from headrace.errors import HeadraceError
from headrace.protocol.sampling_params import SamplingParams
from headrace.serving.errors import ApiError, as_api_error
from headrace.serving.metrics import ServerMetrics
from headrace.serving.settings import ServerSettings

# Texts longer than this are tokenized beside the event loop: the others go on meanwhile.
_LONG_TEXT = 20_000


class RequestTimeout(HeadraceError):
    """A request took longer than --request-timeout."""


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
        self.metrics.attach(engine.running)

    def ready(self) -> AsyncLLM:
        """The engine. Raises ApiError while it loads, when it is broken and when it drains."""
        if self.draining:
            raise ApiError(503, "the server is shutting down: no new requests are taken")
        if self.engine is None:
            raise ApiError(503, "the model is still loading: try again in a moment")
        if self.engine.error is not None:
            raise ApiError(503, f"the engine has ended: {self.engine.error}")
        return self.engine

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served; None means the one that is."""
        if name is not None and name not in self.settings.served_model_names:
            raise ApiError(
                404,
                f"the model {name!r} does not exist: this server has "
                f"{', '.join(self.settings.served_model_names)}",
                param="model",
                code="model_not_found",
            )

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises UsageError if it is no valid Unicode."""
        encode = self.ready().running.tokenizer.encode
        if len(text) > _LONG_TEXT:
            return await asyncio.to_thread(encode, text, add_special_tokens)
        return encode(text, add_special_tokens)

    def token_text(self, token: int) -> str:
        """How a token reads by itself, special ones included."""
        core = self.ready().running.tokenizer.core
        return str(core.decode([token], skip_special_tokens=False))

    async def begin(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        priority: int,
        fields: frozenset[str],
    ) -> "Generation":
        """Have the engine take prompts on; close() what this gives, whatever happens.

        fields: names of the request's fields, one of which errors may name. Raises ApiError.
        """
        engine = self.ready()
        count = params.n * len(prompts)
        queue, slots = self.settings.max_queued_requests, engine.config.sequences
        if count > slots + queue:
            raise ApiError(
                400,
                f"the request asks for {count} completions, more than the {slots} that may run "
                f"and the {queue} that may wait (--max-queued-requests)",
            )
        if self._open + count > slots + queue:
            raise ApiError(
                429, f"{self._open} completions run or wait already: try again later",
                code="queue_full",
            )  # fmt: skip
        self._open += count
        self.quiet.clear()
        try:
            submission = await engine.submit(prompts, params, priority=priority)
        except BaseException as error:
            self._leave(count)
            if isinstance(error, HeadraceError):
                raise as_api_error(error, fields) from error
            raise
        return Generation(self, submission, count)

    def _leave(self, count: int) -> None:
        self._open -= count
        if not self._open:
            self.quiet.set()

    def ended(self, generation: "Generation") -> None:
        """A generation was closed."""
        self._leave(generation.count)


class Generation:
    """Prompts that run. Iterating gives (prompt's number, its new deltas). Raises ApiError."""

    def __init__(self, service: Service, submission: Submission, count: int) -> None:
        self.count = count
        self._service = service
        self._submission = submission
        self._watches = [
            service.metrics.begin(len(request.prompt), submission.params)
            for request in submission.requests
        ]
        self._open = True
        limit = service.settings.request_timeout
        self._timer = None
        if limit is not None:
            self._timer = asyncio.get_running_loop().call_later(limit, self._expire, limit)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Sequence[OutputDelta]]]:
        try:
            async for number, deltas in self._submission:
                self._watches[number].take(deltas)
                if any(delta.finish_reason == "abort" for delta in deltas):
                    raise ApiError(503, "the server is shutting down: the answer was cut")
                yield number, deltas
        except RequestTimeout as error:
            raise ApiError(408, str(error)) from error
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
            self._service.ended(self)

    def _expire(self, limit: float) -> None:
        self._submission.abort()
        self._submission.fail(
            RequestTimeout(f"the answer was not complete within {limit:g} s (--request-timeout)")
        )
