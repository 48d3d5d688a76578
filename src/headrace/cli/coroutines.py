"""Runs what a command does in an event loop, which signals cancel."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headrace.signals import EndingSignals, put_off, unwinding

_T = TypeVar("_T")


def run_coroutine(
    main: Callable[[], Coroutine[Any, Any, _T]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> _T:
    """What it returns, as asyncio.run has it. To be called in the main thread.

    A signal that ends the command cancels it, and ends the command once it has cleaned up, whatever
    came of it. It does not raise in the midst of it: HTTP clients, among others, take whatever
    comes out of their parsers for a broken connection.
    """
    with (
        put_off(unwinding()) as signals,
        asyncio.Runner(loop_factory=loop_factory) as runner,
    ):
        return runner.run(_cancelled_by(signals, main))


async def _cancelled_by(signals: EndingSignals, main: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    cancelled = False

    def cancel() -> None:
        nonlocal cancelled
        # Once: a second time would break off what the first one has to clean up.
        if not cancelled:
            cancelled = True
            loop.call_soon_threadsafe(task.cancel)

    signals.tell(cancel)
    try:
        return await main()
    finally:
        # Nobody is there to be cancelled any more, and soon there is no loop.
        signals.tell(lambda: None)
