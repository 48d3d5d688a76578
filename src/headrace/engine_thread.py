"""The engine in a thread of its own, and what asyncio programs have it run."""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from headrace.deployment.start import RunningEngine
from headrace.engine.outputs import OutputDelta
from headrace.engine.prepared import Prepared
from headrace.errors import HeadraceError, PipelineError, UsageError

_log = logging.getLogger(__name__)

# Deltas that a reader is given at once, but for those of one step.
_MOST_AT_ONCE = 256


class Submission:
    """Prompts handed in together, between their reader, in an event loop, and the engine's thread.

    Iterating gives (prompt's number, its deltas), what came since the last look; so what waits
    for a slow reader is bounded by the prompts' own tokens. However much waits, others in the event
    loop have their turn between one look and the next. Raises the error that ends them.
    on_arrival: called with the same in the reader's loop as soon as it comes, whether or not
    anybody reads.
    """

    def __init__(
        self,
        thread: "EngineThread",
        prompts: list[list[int]],
        prepared: Prepared,
        priority: int,
        salt: bytes = b"",
        on_arrival: Callable[[int, list[OutputDelta]], None] = lambda _, __: None,
    ) -> None:
        self.requests = [
            SubmittedPrompt(self, number, prompt) for number, prompt in enumerate(prompts)
        ]
        self.prepared = prepared
        self.params = prepared.params
        self.priority = priority
        self.salt = salt
        self.loop = asyncio.get_running_loop()
        self._thread = thread
        self._on_arrival = on_arrival
        self._accepted = False
        self._news = asyncio.Event()
        self._deltas: deque[tuple[int, list[OutputDelta]]] = deque()
        # Completions whose end has not arrived yet.
        self._unfinished = self.params.n * len(prompts)
        self._error: HeadraceError | None = None

    async def accepted(self) -> None:
        """Wait until the engine has taken all prompts on; raises the error if it does not."""
        while not self._accepted:
            self._raise()
            await self._news.wait()
            self._news.clear()

    def __aiter__(self) -> "Submission":
        return self

    async def __anext__(self) -> tuple[int, list[OutputDelta]]:
        if self._deltas:
            await asyncio.sleep(0)
        while not self._deltas:
            if self.finished:
                raise StopAsyncIteration
            self._raise()
            await self._news.wait()
            self._news.clear()
        number, deltas = self._deltas.popleft()
        while self._deltas and self._deltas[0][0] == number and len(deltas) < _MOST_AT_ONCE:
            deltas += self._deltas.popleft()[1]
        return number, deltas

    @property
    def finished(self) -> bool:
        """Whether the engine is done with all of it, read or not."""
        return self._unfinished == 0

    def abort(self) -> None:
        """End what runs; its completions then end with finish_reason "abort"."""
        if self._error is None and self._unfinished:
            self._thread.abort(self)

    # Called in the reader's loop.

    def accept(self) -> None:
        self._accepted = True
        self._news.set()

    def take(self, number: int, deltas: list[OutputDelta]) -> None:
        self._unfinished -= sum(delta.finish_reason is not None for delta in deltas)
        self._on_arrival(number, deltas)
        self._deltas.append((number, deltas))
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


@dataclass(eq=False)
class SubmittedPrompt:
    """One prompt of a submission. engine_id belongs to the engine's thread."""

    submission: Submission
    number: int
    prompt: list[int]
    engine_id: int | None = None


_Order = Callable[[], None]
_Delivery = tuple[SubmittedPrompt, list[OutputDelta]]


class EngineThread:
    """Runs the engine, and carries out orders between its steps."""

    def __init__(self, running: RunningEngine) -> None:
        self._engine = running.engine
        self._recovery = running.recovery
        self._processes = running.processes
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._requests: dict[int, SubmittedPrompt] = {}
        self._closing = False
        # Reentrant, since the garbage collector may close a forgotten engine at any moment.
        self._lock = threading.RLock()
        self._done = False
        # Why no more requests are taken: set once, by the thread.
        self.error: HeadraceError | None = None
        self.ended: Future[HeadraceError] = Future()
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._thread.start()

    def add(self, submission: Submission) -> None:
        """Have the engine take all prompts on, or none of them. Raises UsageError in a fork of the
        engine's process."""
        self._processes.check_owner()
        self._order(lambda: self._add(submission))

    def abort(self, submission: Submission) -> None:
        """Have the engine end what runs, before its next plan."""
        self._order(lambda: self._abort(submission))

    def close(self) -> None:
        """Abort everything and end the stages; waits for it, however often it is called."""
        self._order(self._begin_closing)
        # The garbage collector may come by in the thread itself, which then ends by itself.
        if self._processes.owned and threading.current_thread() is not self._thread:
            self._thread.join()

    def _order(self, order: _Order) -> None:
        if not self._processes.owned:
            # A fork has neither the thread nor, for sure, the lock.
            return
        with self._lock:
            if not self._done:
                self._orders.put(order)
                self._processes.wake()
                return
        # Nobody takes orders any more; what they do then is to say so.
        order()

    def _run(self) -> None:
        try:
            while not self._closing:
                while not self._orders.empty():
                    self._orders.get()()
                # Also when there is nothing to do: an order wakes it, and so does a death. What has
                # ended is released even if the order was to close.
                if not (self._closing and self._engine.idle):
                    self._deliver(self._recovery.step())
            self._end(UsageError("this AsyncLLM is closed: make another"))
            self._processes.close(drain=True)
        except Exception as error:
            self._end(error if isinstance(error, HeadraceError) else _internal(error))
        finally:
            self._processes.close(drain=False)

    def _end(self, reason: HeadraceError) -> None:
        """Take no more orders, and tell every reader."""
        if self.error is None:
            self.error = reason
            with self._lock:
                self._done = True
            try:
                self._tell_readers(reason)
            finally:
                self.ended.set_result(reason)

    def _tell_readers(self, reason: HeadraceError) -> None:
        while not self._orders.empty():
            self._orders.get()()
        for number, request in self._requests.items():
            submission = request.submission
            if self._closing:
                deliveries = [(request, self._engine.abort(number))]
                _post(submission.loop, _hand_out, deliveries)
            else:
                _post(submission.loop, submission.fail, reason)
        self._requests.clear()

    def _begin_closing(self) -> None:
        self._closing = True

    def _add(self, submission: Submission) -> None:
        if self.error is not None:
            _post(submission.loop, submission.fail, self.error)
            return
        try:
            for request in submission.requests:
                request.engine_id = self._engine.add(
                    request.prompt, submission.prepared, submission.priority, submission.salt
                )
                self._requests[request.engine_id] = request
            _post(submission.loop, submission.accept)
        except Exception as error:
            if not isinstance(error, HeadraceError):
                _log.exception("internal error while a request was taken on")
            reason = error if isinstance(error, HeadraceError) else _internal(error)
            self._forget(submission)
            _post(submission.loop, submission.fail, reason)

    def _abort(self, submission: Submission) -> None:
        for request in submission.requests:
            if request.engine_id is not None and self.error is None:
                self._deliver(self._engine.abort(request.engine_id))

    def _forget(self, submission: Submission) -> None:
        """End what of it was taken on, without telling anybody."""
        for request in submission.requests:
            if request.engine_id in self._requests:
                del self._requests[request.engine_id]
                self._engine.abort(request.engine_id)

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        """Each request's news to its reader, at once; each loop is woken once."""
        news: dict[int, list[OutputDelta]] = {}
        for delta in deltas:
            news.setdefault(delta.request_id, []).append(delta)
        by_loop: dict[asyncio.AbstractEventLoop, list[_Delivery]] = {}
        for number, own in news.items():
            request = self._requests[number]
            by_loop.setdefault(request.submission.loop, []).append((request, own))
            if not self._engine.is_running(number):
                del self._requests[number]
        for loop, deliveries in by_loop.items():
            if not _post(loop, _hand_out, deliveries):
                self._forget_readers_in(loop)

    def _forget_readers_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """End what nobody reads any more."""
        for submission in {request.submission for request in self._requests.values()}:
            if submission.loop is loop:
                self._forget(submission)


def _hand_out(deliveries: list[_Delivery]) -> None:
    for request, deltas in deliveries:
        request.submission.take(request.number, deltas)


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
