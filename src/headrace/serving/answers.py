"""How answers travel: whole or as events, given up when the client goes, and the last of a line.

Source of the events' form: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.errors import HeadraceError
from headrace.serving.api_errors import INTERNAL, ApiError, as_api_error
from headrace.serving.connection import LINGER_S, TRANSPORT
from headrace.serving.pieces import Pieces, joined
from headrace.serving.service import Generation

_log = logging.getLogger(__name__)

_Value = TypeVar("_Value")

_DONE = b"data: [DONE]\n\n"
# What no client takes for an event.
_COMMENT = b": keep-alive\n\n"
# What is sent before others have a turn, a single event counted as if it had so many bytes more.
_TURN_BYTES = 256 * 1024
_EACH = 4096


class ClientGone(Exception):
    """The client closed the connection before it had its answer: nobody is to be told."""


class WholeAnswer(Response):
    """JSON that the work gives. Raises the work's error, and ClientGone.

    generation: closed when the answer is on its way, or will never be, whatever the reason.
    """

    media_type = "application/json"

    def __init__(self, work: Coroutine[Any, Any, Pieces], generation: Generation) -> None:
        super().__init__()
        self._work = work
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            pieces = await unless_gone(receive, self._work)
            self._generation.check_not_cut()
            sender = _Sender(scope, send, self._generation)
            with contextlib.suppress(ClientGone):
                await unless_gone(receive, self._send(sender, pieces))
        finally:
            self._generation.close()

    async def _send(self, sender: "_Sender", pieces: Pieces) -> None:
        self.headers["content-length"] = str(sum(map(len, pieces)))
        await sender.start(self)
        await sender.send(pieces)
        await sender.end()


class EventStream(Response):
    """Each of the JSON texts as an event, then [DONE]; an error becomes an event too.

    generation: closed when all is over, whatever the reason. keep_alive: seconds after which a
    comment breaks the silence, or proxies and clients would take the stream for dead; 0 for never.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[Pieces, None], generation: Generation, keep_alive: float
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._generation = generation
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone):
                sender = _Sender(scope, send, self._generation)
                await unless_gone(receive, self._send_all(sender))
        finally:
            self._generation.close()
            await self._events.aclose()

    async def _send_all(self, sender: "_Sender") -> None:
        await sender.start(self)
        keeper = asyncio.create_task(_break_silences(sender, self._keep_alive))
        try:
            await self._send_events(sender)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        await sender.send([_DONE])
        await sender.end()

    async def _send_events(self, sender: "_Sender") -> None:
        try:
            async for event in self._events:
                await sender.send([b"data: ", *event, b"\n\n"])
            return
        except ApiError as caught:
            error = caught
        except HeadraceError as caught:
            error = as_api_error(caught)
        except Exception:
            _log.exception("internal error in a stream")
            error = INTERNAL
        # The status is 200 already, so the log would have no trace of it.
        _log.warning("a stream ended with an error: %s", error)
        await sender.send([b"data: " + error.as_json() + b"\n\n"])


class _Sender:
    """Sends an answer piece by piece, as its reader takes them, and counts what waits for that.

    Whatever is sent at once stays together. newest: when that began or ended, on the loop's clock.
    """

    def __init__(self, scope: Scope, send: Send, generation: Generation) -> None:
        self._transport: asyncio.Transport = scope[TRANSPORT]
        self._send = send
        self._generation = generation
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._sent = 0
        self.newest = self._loop.time()

    async def start(self, response: Response) -> None:
        """Status and headers. From here on the answer is cut by cutting its connection."""
        self._generation.cut_connection = self._transport.abort
        start = {"type": "http.response.start", "status": response.status_code}
        await self._send({**start, "headers": response.raw_headers})

    async def send(self, pieces: Pieces) -> None:
        """All of them."""
        held = self._generation.held
        # Pieces that come several times are there once.
        size = sum(map(len, {id(piece): piece for piece in pieces}.values()))
        held.add(size)
        try:
            async with self._turn:
                for piece in joined(pieces):
                    await self._send_body(piece)
        finally:
            held.add(-size)

    async def end(self) -> None:
        """Once the transport has taken all but a little."""
        await self._send_body(b"", more=False)

    async def _send_body(self, data: bytes, more: bool = True) -> None:
        self.newest = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._generation.held.unsent(self._transport.get_write_buffer_size())
        self.newest = self._loop.time()
        # A reader that takes everything at once would leave others no turn.
        self._sent += len(data) + _EACH
        if self._sent > _TURN_BYTES:
            self._sent = 0
            await asyncio.sleep(0)


async def _break_silences(sender: _Sender, interval: float) -> None:
    if not interval:
        return
    loop = asyncio.get_running_loop()
    while True:
        while (wait := sender.newest + interval - loop.time()) > 0:
            await asyncio.sleep(wait)
        await sender.send([_COMMENT])


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
