"""Generation for asyncio programs: many requests at once, each an asynchronous stream."""

import asyncio
import itertools
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.outputs import OutputDelta, OutputGatherer, RequestOutput
from headrace.errors import HeadraceError, PipelineError, UsageError
from headrace.launcher import RunningEngine, launch
from headrace.prompts import Prompt, as_params, as_prompts
from headrace.protocol.checks import check_type
from headrace.protocol.messages import Loading
from headrace.protocol.sampling_params import SamplingParams


class AsyncLLM:
    """A model on its stages, driven by a thread of its own.

    Takes EngineConfig's settings as keyword arguments; loading blocks the caller. Close it, or use
    it as a context manager (`with` or `async with`); a forgotten one is closed when Python exits.
    """

    def __init__(
        self,
        model: str,
        *,
        on_progress: Callable[[Loading], None] = lambda _: None,
        **settings: Any,
    ) -> None:
        self.config = EngineConfig.of("AsyncLLM", model, settings)
        self.running: RunningEngine = launch(self.config, on_progress)
        self._thread = _EngineThread(self.running)
        self._streams: dict[str, _Stream] = {}
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
        output: nothing piles up for it, and it holds up nobody. Cancelling the task, or leaving the
        loop, aborts the request. request_id must not be one that is running; smaller priorities
        run first. Raises UsageError for a request that can never run, PipelineError if the
        pipeline breaks.
        """
        check_type("request_id", request_id, str | None)
        (params,) = as_params(sampling_params, 1)
        (tokenized,) = as_prompts([prompt], self.running.tokenizer)
        name = request_id
        while name is None or (request_id is None and name in self._streams):
            name = str(next(self._numbers))
        if name in self._streams:
            raise UsageError(f"request_id {name!r} is running already: choose another")
        ids = tokenized.token_ids
        gatherer = OutputGatherer(name, tokenized.text, ids, params)
        stream = _Stream(ids, params, priority, gatherer, asyncio.get_running_loop())
        self._streams[name] = stream
        try:
            self._thread.add(stream)
            finished = False
            while not finished:
                output = await stream.next_output()
                # Not the gatherer's word: it may have the rest by the time the reader is back.
                finished = output.finished
                yield output
        finally:
            del self._streams[name]
            if not gatherer.finished:
                self._thread.abort(stream)

    async def abort(self, request_id: str) -> None:
        """End a request, whose stream then ends with finish_reason "abort"; unknown ones are
        taken to have ended already."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._thread.abort(stream)

    def close(self) -> None:
        """Abort what runs and end the stages; waits until they have ended."""
        self._thread.close()

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)


@dataclass(eq=False)
class _Stream:
    """A request between its reader, in an event loop, and the engine's thread.

    engine_id belongs to the engine's thread, everything else to the loop.
    """

    prompt: list[int]
    params: SamplingParams
    priority: int
    gatherer: OutputGatherer
    loop: asyncio.AbstractEventLoop
    engine_id: int | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _error: HeadraceError | None = None

    async def next_output(self) -> RequestOutput:
        """What there is once there is something new; raises the request's error."""
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            # A new one for each reader: one that is raised again gathers all their tracebacks.
            error = type(self._error)(str(self._error))
            for note in getattr(self._error, "__notes__", ()):
                error.add_note(note)
            raise error from self._error.__cause__
        return self.gatherer.output()

    def take(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            self.gatherer.take(delta)
        self._news.set()

    def fail(self, error: HeadraceError) -> None:
        self._error = error
        self._news.set()

    def post(self, callback: Callable[..., None], *arguments: Any) -> bool:
        """Have the reader's loop call back; False if it is closed, so that nobody reads."""
        try:
            self.loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            return False
        return True


_Order = Callable[[], None]


class _EngineThread:
    """Runs the engine, and carries out orders between its steps."""

    def __init__(self, running: RunningEngine) -> None:
        self._engine = running.engine
        self._stages = running.stages
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._streams: dict[int, _Stream] = {}
        self._closing = False
        # Reentrant, since the garbage collector may close a forgotten engine at any moment.
        self._lock = threading.RLock()
        self._done = False
        # Why no more requests are taken: set once, by the thread.
        self._ended: HeadraceError | None = None
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._thread.start()

    def add(self, stream: _Stream) -> None:
        self._order(lambda: self._add(stream))

    def abort(self, stream: _Stream) -> None:
        self._order(lambda: self._abort(stream))

    def close(self) -> None:
        """Abort everything and end the stages; waits for it, however often it is called."""
        self._order(self._begin_closing)
        # The garbage collector may come by in the thread itself, which then ends by itself.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _order(self, order: _Order) -> None:
        with self._lock:
            if not self._done:
                self._orders.put(order)
                self._stages.wake()
                return
        # Nobody takes orders any more; what they do then is to say so.
        order()

    def _run(self) -> None:
        try:
            while not self._closing:
                if self._engine.scheduler.idle:
                    self._orders.get()()
                while not self._orders.empty():
                    self._orders.get()()
                if not self._engine.scheduler.idle:
                    self._deliver(self._engine.step())
            self._end(UsageError("this AsyncLLM is closed: make another"))
            self._stages.close(drain=True)
        except Exception as error:
            self._end(error if isinstance(error, HeadraceError) else _internal(error))
        finally:
            self._stages.close(drain=False)

    def _end(self, reason: HeadraceError) -> None:
        """Take no more orders, and tell every reader."""
        if self._ended is None:
            self._ended = reason
            with self._lock:
                self._done = True
            while not self._orders.empty():
                self._orders.get()()
            for number, stream in self._streams.items():
                if self._closing:
                    stream.post(stream.take, self._engine.abort(number))
                else:
                    stream.post(stream.fail, reason)
            self._streams.clear()

    def _begin_closing(self) -> None:
        self._closing = True

    def _add(self, stream: _Stream) -> None:
        try:
            if self._ended is not None:
                stream.post(stream.fail, self._ended)
                return
            stream.engine_id = self._engine.add(stream.prompt, stream.params, stream.priority)
            self._streams[stream.engine_id] = stream
        except HeadraceError as error:
            stream.post(stream.fail, error)
        except Exception as error:
            stream.post(stream.fail, _internal(error))

    def _abort(self, stream: _Stream) -> None:
        if stream.engine_id is not None and self._ended is None:
            self._deliver(self._engine.abort(stream.engine_id))

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        """Each request's news to its reader, at once."""
        by_stream: dict[_Stream, list[OutputDelta]] = {}
        for delta in deltas:
            by_stream.setdefault(self._streams[delta.request_id], []).append(delta)
        for stream, news in by_stream.items():
            number = news[0].request_id
            if not self._engine.is_running(number):
                del self._streams[number]
            if not stream.post(stream.take, news) and number in self._streams:
                self._engine.abort(number)
                del self._streams[number]


def _internal(error: Exception) -> PipelineError:
    wrapped = PipelineError(f"internal error: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
