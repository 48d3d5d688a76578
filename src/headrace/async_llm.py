"""Generation for asyncio programs: many requests at once, each an asynchronous stream."""

import asyncio
import itertools
import weakref
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.checks import check_type
from headrace.config import EngineConfig
from headrace.deployment.model_card import ModelCard
from headrace.deployment.recovery import RecoveryStatus
from headrace.deployment.start import StartWatch, launch
from headrace.engine.detokenizer import Detokenizer
from headrace.engine.outputs import OutputDelta, OutputGatherer, RequestOutput
from headrace.engine.prepared import Prepared
from headrace.engine.snapshot import EngineSnapshot
from headrace.engine_thread import EngineThread, Submission
from headrace.errors import HeadraceError, UsageError
from headrace.prompts import Prompt, as_params, as_prompts
from headrace.protocol.messages import Loading
from headrace.sampling_params import SamplingParams

# So many stop strings and bad words are made ready in a millisecond or so.
_MANY_TEXTS = 16
_MANY_CHARACTERS = 1000


class AsyncLLM:
    """A model on its stages, driven by a thread of its own.

    model: as EngineConfig has it, with EngineConfig's other settings as keyword arguments; or an
    EngineConfig. Loading blocks the caller, and calls check once a second or more often, which may
    raise to give up; on_tokenizer is given the tokenizer while the stages load. Close it, or use it
    as a context manager (`with` or `async with`); a forgotten one is closed when Python exits.
    Any number of event loops, each in a thread of its own, may use it at once. A process forked
    from this one cannot: there UsageError is raised.
    """

    def __init__(
        self,
        model: str | EngineConfig,
        *,
        on_progress: Callable[[Loading], None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
        on_tokenizer: Callable[[Tokenizer], None] = lambda _: None,
        **settings: Any,
    ) -> None:
        self.config = EngineConfig.of("AsyncLLM", model, settings)
        watch = StartWatch(on_progress=on_progress, check=check, on_tokenizer=on_tokenizer)
        self._running = launch(self.config, watch)
        self.card: ModelCard = self._running.card
        self.tokenizer: Tokenizer = self._running.tokenizer
        self.detokenizer: Detokenizer = self._running.engine.detokenizer
        self.reader: Detokenizer = self._running.engine.reader
        self._thread = EngineThread(self._running)
        self._named: dict[str, Submission] = {}
        self._numbers = itertools.count()
        # The thread must not keep this object alive, or nothing would ever close it.
        self._close_at_exit = weakref.finalize(self, self._thread.close)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; each output is everything so far, the last one is finished.

        A reader that is slower than the model is given what has come about meanwhile in one
        output, and it holds up nobody. Cancelling the task, or leaving the loop, aborts the
        request. request_id must not be one that is running; smaller priorities run first. Raises
        UsageError for a request that can never run, PipelineError if the pipeline breaks for good.
        """
        check_type("request_id", request_id, str | None)
        (params,) = as_params(sampling_params, 1, self.get_default_sampling_params())
        (tokenized,) = as_prompts([prompt], self.tokenizer)
        prepared = await self._prepare(params)
        request = Submission(
            self._thread, [tokenized.token_ids], prepared, priority, tokenized.salt
        )
        names = map(str, self._numbers) if request_id is None else [request_id]
        for name in names:
            # Looked up and taken at once: another loop may be about to take the same name.
            if self._named.setdefault(name, request) is request:
                break
        else:
            raise UsageError(f"request_id {request_id!r} is running already: choose another")
        gatherer = OutputGatherer(
            name, tokenized.text, tokenized.token_ids, params, self.reader.text_of
        )
        try:
            self._thread.add(request)
            async for _, deltas in request:
                for delta in deltas:
                    gatherer.take(delta)
                yield gatherer.output()
        finally:
            del self._named[name]
            request.abort()

    def get_default_sampling_params(self) -> SamplingParams:
        """What holds where no SamplingParams are given: the model's own defaults, if it has some
        and generation_config is auto."""
        return SamplingParams(**self.card.sampling_defaults)

    @property
    def snapshot(self) -> EngineSnapshot:
        """The engine's newest figures, for any thread."""
        return self._running.engine.snapshot

    async def submit(
        self,
        prompts: list[list[int]],
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        salt: bytes = b"",
        on_arrival: Callable[[int, list[OutputDelta]], None] = lambda _, __: None,
    ) -> Submission:
        """Prompts once the engine has taken them on, to be read delta by delta; abort() them when
        they are no longer wanted.

        prompts: token ids. salt: only requests with the same find each other's tokens in the prefix
        cache. on_arrival: called with a prompt's number and its deltas as they come, before they
        are read. Raises UsageError if one of them can never run, PipelineError if the pipeline
        broke; nothing of them runs then.
        """
        prepared = await self._prepare(sampling_params)
        submission = Submission(self._thread, prompts, prepared, priority, salt, on_arrival)
        self._thread.add(submission)
        try:
            await submission.accepted()
        except BaseException:
            submission.abort()
            raise
        return submission

    async def _prepare(self, params: SamplingParams) -> Prepared:
        """For the engine; long lists beside the event loop."""
        prepare = self._running.engine.prepare
        texts = (*params.stop, *params.bad_words)
        if len(texts) > _MANY_TEXTS or sum(map(len, texts)) > _MANY_CHARACTERS:
            return await asyncio.to_thread(prepare, params)
        return prepare(params)

    async def abort(self, request_id: str) -> None:
        """End a request, whose stream then ends with finish_reason "abort"; unknown ones are
        taken to have ended already."""
        request = self._named.get(request_id)
        if request is not None:
            request.abort()

    @property
    def recovery(self) -> RecoveryStatus:
        """How it recovers from faults, at this moment, for any thread."""
        return self._running.recovery.status

    @property
    def error(self) -> HeadraceError | None:
        """Why no request is taken any more; None while all is well."""
        return self._thread.error

    async def ended(self) -> HeadraceError:
        """Wait until no request is taken any more, and return why."""
        self._running.processes.check_owner()
        # Shielded, since a waiter that is cancelled would cancel the others' future.
        return await asyncio.shield(asyncio.wrap_future(self._thread.ended))

    def close(self) -> None:
        """Abort what runs and end the stages; waits until they have ended. Raises UsageError in a
        fork of the process that made it."""
        self._running.processes.check_owner()
        self._thread.close()

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self._thread.close)
