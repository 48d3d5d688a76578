"""How answers travel: whole or as events, given up when the client goes, and the last of a line.

Source of the events' form: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.errors import HeadraceError
from headrace.serving.connection import LINGER_S
from headrace.serving.errors import INTERNAL, ApiError, as_api_error

_log = logging.getLogger(__name__)

_Value = TypeVar("_Value")

_DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection before it had its answer: nobody is to be told."""


class WholeAnswer(Response):
    """JSON of what the work gives. Raises the work's error, and ClientGone.

    close: called when the answer is on its way, or will never be, whatever the reason.
    """

    media_type = "application/json"

    def __init__(
        self, work: Coroutine[Any, Any, msgspec.Struct], close: Callable[[], None]
    ) -> None:
        super().__init__()
        self._work = work
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            data = msgspec.json.encode(await _unless_gone(receive, self._work))
            await Response(data, media_type=self.media_type)(scope, receive, send)
        finally:
            self._close()


class EventStream(Response):
    """Each of the JSON texts as an event, then [DONE]; an error becomes an event too.

    close: called when all is over, whatever the reason.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone):
                await _unless_gone(receive, self._send_all(send))
        finally:
            self._close()
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await _send_body(send, b"data: " + event + b"\n\n")
        except ApiError as error:
            await _send_error(send, error)
        except HeadraceError as error:
            await _send_error(send, as_api_error(error))
        except Exception:
            _log.exception("internal error in a stream")
            await _send_error(send, INTERNAL)
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})


class LastResponse(Response):
    """An answer to a request that was not read to its end, after which the connection ends.

    Not at once: what the client still sends would make its system drop the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        await _send_body(send, bytes(self.body))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, _Value]) -> _Value:
    """What the work gives; raises ClientGone, and cancels it, if the client goes away first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_error(send: Send, error: ApiError) -> None:
    """The status is 200 already, so the log would have no trace of it."""
    _log.warning("a stream ended with an error: %s", error)
    await _send_body(send, b"data: " + error.as_json() + b"\n\n")


async def _send_body(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
