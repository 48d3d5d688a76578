"""Server-sent events, and answers that are given up when the client goes away.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.errors import HeadraceError
from headrace.serving.body import ClientGone
from headrace.serving.errors import INTERNAL, ApiError, as_api_error

_log = logging.getLogger(__name__)

_Value = TypeVar("_Value")

_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Each of the JSON texts as an event, then [DONE]; an error becomes an event too.

    close: called when all is over, whatever the reason.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            self._close()
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        try:
            async for event in self._events:
                await _send_body(send, b"data: " + event + b"\n\n")
        except ApiError as error:
            await _send_body(send, b"data: " + error.as_json() + b"\n\n")
        except HeadraceError as error:
            await _send_body(send, b"data: " + as_api_error(error).as_json() + b"\n\n")
        except Exception:
            _log.exception("internal error in a stream")
            await _send_body(send, b"data: " + INTERNAL.as_json() + b"\n\n")
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _Value]) -> _Value:
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


async def _send_body(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
