"""A client's connection, which must not take for ever to say what it wants."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.serving.errors import error_json

# As much as a header may have: as in nginx, with room for long keys.
_MOST_HEADER_BYTES = 64 * 1024


class Connection(HttpToolsProtocol):
    """uvicorn's, with a deadline and a size for the header of each request.

    read_timeout: seconds for a header to arrive, set on a subclass by with_timeout().
    """

    read_timeout: float

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._header_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._header_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and self.cycle.response_complete:
            self._expect_header()
        if self._deadline is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._deadline is not None and self._header_bytes > _MOST_HEADER_BYTES:
            self._refuse(431, f"the header is larger than {_MOST_HEADER_BYTES} bytes")

    def on_headers_complete(self) -> None:
        self._header_arrived()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "the request is no valid HTTP")

    def _expect_header(self) -> None:
        self._header_bytes = 0
        self._deadline = self.loop.call_later(
            self.read_timeout,
            self._refuse,
            408,
            f"no request arrived within {self.read_timeout:g} s",
        )

    def _header_arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: int, message: str) -> None:
        """Say what is wrong, and end the connection."""
        self._header_arrived()
        if self.transport.is_closing():
            return
        body = error_json(status, message)
        self.transport.write(
            b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b" % (status, len(body), body)
        )
        self.transport.close()


def with_timeout(read_timeout: float) -> type[Connection]:
    """The class of connections that wait so many seconds for a header."""
    return type("Connection", (Connection,), {"read_timeout": read_timeout})
