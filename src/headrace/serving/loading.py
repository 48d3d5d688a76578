"""The engine loads in a thread of its own, beside the server's imports and its first answers."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from headrace.async_llm import AsyncLLM


class _GivenUp(Exception):
    """Nobody wants the engine any more."""


class EngineLoader:
    """Loads at once. load: gives the engine; it is given what to call once a second or more often
    meanwhile, which raises if it is to give up."""

    def __init__(self, load: Callable[[Callable[[], None]], AsyncLLM]) -> None:
        self._closing = threading.Event()
        self._loaded: Future[AsyncLLM | None] = Future()
        self._thread = threading.Thread(target=self._run, args=(load,), name="headrace-load")
        self._thread.start()

    async def engine(self) -> AsyncLLM | None:
        """The engine once it is there, None if it was given up; raises what loading raised."""
        return await asyncio.shield(asyncio.wrap_future(self._loaded))

    def close(self) -> None:
        """Give up, or close the engine; waits for it, however often it is called."""
        self._closing.set()
        self._thread.join()
        if self._loaded.exception() is None and (engine := self._loaded.result()) is not None:
            engine.close()

    def _run(self, load: Callable[[Callable[[], None]], AsyncLLM]) -> None:
        try:
            self._loaded.set_result(load(self._check))
        except _GivenUp:
            self._loaded.set_result(None)
        except BaseException as error:
            self._loaded.set_exception(error)

    def _check(self) -> None:
        if self._closing.is_set():
            raise _GivenUp
