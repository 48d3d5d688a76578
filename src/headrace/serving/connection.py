"""A client's connection, which must not take for ever to ask, or to take its answer."""

import asyncio
import http
import logging
import math
from typing import cast

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.serving.api_errors import error_json
from headrace.serving.open_files import REFUSED_AT_ONCE

_log = logging.getLogger(__name__)

# As much as a header may have, and a read of the socket more: as in nginx, with room for long keys.
_MOST_HEADER_BYTES = 64 * 1024
# Requests that wait on a connection until the one before is answered.
_MOST_WAITING = 16
# What a request's scope has its connection's transport under.
TRANSPORT = "headrace.transport"
# Seconds for a client that was refused to read that, and to end the connection.
LINGER_S = 2.0
# Seconds in which a client that is sent something has to take some of it.
_STUCK_READER_S = 300.0
# Seconds between two lines in the log about too many connections.
_TELL_EVERY_S = 60.0


class Connection(HttpToolsProtocol):
    """uvicorn's, with a deadline and a size for the header of each request.

    It ends one that takes nothing of an answer.

    read_timeout: seconds for a header to arrive; most: connections that there may be at once;
    full_at: when it was last logged that there were more. Set on a subclass by with_limits().
    """

    read_timeout: float
    most: int
    full_at: float

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        # Whether what comes next is a header's, and how much of it came.
        self._in_header = True
        self._header_bytes = 0
        self._read_bytes = 0
        self._refused = False
        # The request that is being answered, or was last.
        self._answered: RequestResponseCycle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = self.loop.call_later(
            self.read_timeout, self._too_late
        )
        if len(self.connections) > self.most:
            self._too_many()

    def connection_lost(self, exc: Exception | None) -> None:
        self._no_deadline()
        self.resume_writing()
        if self._answered is not None and not self._answered.response_complete:
            # uvicorn tells only the newest request, and others may wait behind the one that runs.
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._deadline is None and self.cycle.response_complete:
            self._deadline = self.loop.call_later(self.read_timeout, self._too_late)
        self._read_bytes = len(data)
        super().data_received(data)
        if self._in_header:
            self._header_bytes += len(data)
            if self._header_bytes > _MOST_HEADER_BYTES:
                self._refuse(431, f"the header is larger than {_MOST_HEADER_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        # Nobody asks for trailers, so they are not kept.
        if self._in_header:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._no_deadline()
        self._in_header = False
        if self.parser.should_upgrade() and self._has_body():
            # The parser would take the body for another request.
            self._refuse(400, "a request with a body must not ask for an upgrade: use HTTP/1.1")
            return
        super().on_headers_complete()
        if len(self.pipeline) > _MOST_WAITING:
            self._refuse(400, f"more than {_MOST_WAITING} requests wait on one connection")
        elif self.pipeline:
            # uvicorn stops reading while a request waits behind another, and would not notice that
            # the client leaves.
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        if self._refused:
            return
        self._no_deadline()
        self._in_header = True
        # What else was read with the end of this request is not counted.
        self._header_bytes = -self._read_bytes
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        cast(dict[str, object], cycle.scope)[TRANSPORT] = self.transport
        super()._start_asgi_task(cycle, app)

    def _watch_reader(self, unread: int) -> None:
        """unread: bytes that wait for the client to take them."""

        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left < unread:
                self._watch_reader(left)
            else:
                self.transport.abort()

        self._stuck = self.loop.call_later(_STUCK_READER_S, look)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "the request is no valid HTTP")

    def _unsupported_upgrade_warning(self) -> None:
        """Clients offer HTTP/2 and the like as a matter of course, and go on without."""

    def _has_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.headers
        )

    def _no_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        if self._header_bytes > 0:
            self._refuse(408, f"no whole header arrived within {self.read_timeout:g} s")
        else:
            # Connections are also opened on stock.
            self.transport.close()

    def _too_many(self) -> None:
        """Without a file for one more the system would cut new connections without a word."""
        kind = type(self)
        if self.loop.time() - kind.full_at >= _TELL_EVERY_S:
            kind.full_at = self.loop.time()
            _log.warning(
                "there are %d connections, as many as the limit of open files leaves room for: "
                "more are refused until some have ended (ulimit -n)",
                self.most,
            )
        if len(self.connections) > self.most + REFUSED_AT_ONCE:
            self.transport.abort()
        else:
            self._refuse(503, f"there are {self.most} connections already: try again later")

    def _refuse(self, status: int, message: str) -> None:
        """Say what is wrong, the first thing if it is several, and end the connection."""
        self._no_deadline()
        if self._refused:
            return
        self._refused = True
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or self.pipeline:
                # Nothing may come into the answer to another request.
                self.transport.close()
                return
            # It is this request that is wrong, in its body.
            cycle.disconnected = True
            cycle.message_event.set()
        body = error_json(status, message)
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"%bconnection: close\r\n\r\n%b"
            % (
                status,
                http.HTTPStatus(status).phrase.encode(),
                len(body),
                b"retry-after: 1\r\n" if status == 503 else b"",
                body,
            )
        )
        # Not closed at once: what the client still sends would make its system drop this answer.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def with_limits(read_timeout: float, most: int) -> type[Connection]:
    """The class of connections that wait so many seconds for a header, and are so many."""
    limits = {"read_timeout": read_timeout, "most": most, "full_at": -math.inf}
    return type("Connection", (Connection,), limits)
