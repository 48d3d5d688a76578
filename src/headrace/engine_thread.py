"""The engine in a thread of its own, and the requests that asyncio programs have it run."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from headrace.engine.outputs import OutputDelta
from headrace.errors import HeadraceError, PipelineError, UsageError
from headrace.launcher import RunningEngine
from headrace.protocol.sampling_params import SamplingParams

# How often an idle engine sees whether its stages are alive.
_IDLE_LOOK_S = 0.5


class AsyncRequest:
    """A request between its reader, in an event loop, and the engine's thread.

    Iterating gives its deltas in order, all that came since the last look at once; so what waits
    for a slow reader is bounded by the request's own tokens. Raises the request's error.
    """

    def __init__(
        self, thread: "EngineThread", prompt: list[int], params: SamplingParams, priority: int
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.priority = priority
        self.loop = asyncio.get_running_loop()
        # The engine's thread's own.
        self.engine_id: int | None = None
        self._thread = thread
        self._accepted = False
        self._news = asyncio.Event()
        self._deltas: list[OutputDelta] = []
        self._unfinished = params.n
        self._error: HeadraceError | None = None

    async def accepted(self) -> None:
        """Wait until the engine has taken the request on; raises its error if it does not."""
        while not self._accepted:
            await self._news.wait()
            self._news.clear()
            self._raise()

    def __aiter__(self) -> "AsyncRequest":
        return self

    async def __anext__(self) -> list[OutputDelta]:
        while not self._deltas:
            self._raise()
            if not self._unfinished:
                raise StopAsyncIteration
            await self._news.wait()
            self._news.clear()
        deltas, self._deltas = self._deltas, []
        self._unfinished -= sum(delta.finish_reason is not None for delta in deltas)
        return deltas

    def abort(self) -> None:
        """End the request if it runs; its completions then end with finish_reason "abort"."""
        if self._error is None and self._unfinished:
            self._thread.abort(self)

    # Called in the reader's loop.

    def accept(self) -> None:
        self._accepted = True
        self._news.set()

    def take(self, deltas: list[OutputDelta]) -> None:
        self._accepted = True
        self._deltas += deltas
        self._news.set()

    def fail(self, error: HeadraceError) -> None:
        self._error = error
        self._news.set()

    def _raise(self) -> None:
        if self._error is not None:
            # A new one for each reader: one that is raised again gathers all their tracebacks.
            error = type(self._error)(str(self._error))
            for note in getattr(self._error, "__notes__", ()):
                error.add_note(note)
            raise error from self._error.__cause__


_Order = Callable[[], None]
_Delivery = tuple[AsyncRequest, list[OutputDelta]]


class EngineThread:
    """Runs the engine, and carries out orders between its steps."""

    def __init__(self, running: RunningEngine) -> None:
        self._engine = running.engine
        self._stages = running.stages
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._requests: dict[int, AsyncRequest] = {}
        self._closing = False
        # Reentrant, since the garbage collector may close a forgotten engine at any moment.
        self._lock = threading.RLock()
        self._done = False
        # Why no more requests are taken: set once, by the thread.
        self.error: HeadraceError | None = None
        self.ended: Future[HeadraceError] = Future()
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._thread.start()

    def add(self, request: AsyncRequest) -> None:
        """Have the engine take a request on."""
        self._order(lambda: self._add(request))

    def abort(self, request: AsyncRequest) -> None:
        """Have the engine end a request, before its next plan."""
        self._order(lambda: self._abort(request))

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
                    self._wait_for_order()
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

    def _wait_for_order(self) -> None:
        """Carry out the next order; meanwhile notice the death of a stage, and late reports."""
        while True:
            try:
                self._orders.get(timeout=_IDLE_LOOK_S)()
                return
            except queue.Empty:
                self._deliver(self._engine.step(0.0))

    def _end(self, reason: HeadraceError) -> None:
        """Take no more orders, and tell every reader."""
        if self.error is None:
            self.error = reason
            with self._lock:
                self._done = True
            while not self._orders.empty():
                self._orders.get()()
            for number, request in self._requests.items():
                if self._closing:
                    _post(request.loop, request.take, self._engine.abort(number))
                else:
                    _post(request.loop, request.fail, reason)
            self._requests.clear()
            self.ended.set_result(reason)

    def _begin_closing(self) -> None:
        self._closing = True

    def _add(self, request: AsyncRequest) -> None:
        try:
            if self.error is not None:
                _post(request.loop, request.fail, self.error)
                return
            number = self._engine.add(request.prompt, request.params, request.priority)
            request.engine_id = number
            self._requests[number] = request
            _post(request.loop, request.accept)
        except HeadraceError as error:
            _post(request.loop, request.fail, error)
        except Exception as error:
            _post(request.loop, request.fail, _internal(error))

    def _abort(self, request: AsyncRequest) -> None:
        if request.engine_id is not None and self.error is None:
            self._deliver(self._engine.abort(request.engine_id))

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        """Each request's news to its reader, at once; each loop is woken once."""
        news: dict[int, list[OutputDelta]] = {}
        for delta in deltas:
            news.setdefault(delta.request_id, []).append(delta)
        by_loop: dict[asyncio.AbstractEventLoop, list[_Delivery]] = {}
        for number, own in news.items():
            request = self._requests[number]
            by_loop.setdefault(request.loop, []).append((request, own))
            if not self._engine.is_running(number):
                del self._requests[number]
        for loop, deliveries in by_loop.items():
            if not _post(loop, _hand_out, deliveries):
                self._forget_readers_in(loop)

    def _forget_readers_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """End what nobody reads any more."""
        for number, request in list(self._requests.items()):
            if request.loop is loop:
                self._engine.abort(number)
                del self._requests[number]


def _hand_out(deliveries: list[_Delivery]) -> None:
    for request, deltas in deliveries:
        request.take(deltas)


def _post(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: object
) -> bool:
    """Have a reader's loop call back; False if it is closed, so that nobody reads."""
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        return False
    return True


def _internal(error: Exception) -> PipelineError:
    wrapped = PipelineError(f"internal error: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
