"""A small asynchronous client of any OpenAI-compatible server."""

import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import msgspec

from headrace.errors import ServerError, UsageError

if TYPE_CHECKING:
    import aiohttp

_CONNECT_TIMEOUT_S = 30.0
# Web servers close connections that were idle for some seconds, uvicorn after five. A request sent
# at that very moment would fail, so idle ones are given up here first.
_KEEP_IDLE_S = 2.0
_MOST_SHOWN = 500


class Client:
    """A server's HTTP interface, as an asynchronous context manager.

    base_url: as http://host:port, with or without a slash or /v1 at its end. api_key: sent as a
    bearer token. There is no limit to connections, and none to how long an answer may take. Paths
    start with a slash: /v1/completions. Raises UsageError if base_url is none. All methods raise
    ServerError if the server cannot be reached, refuses, or breaks its answer off.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self.root = _root(base_url)
        self._api_key = api_key
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        # Not at the top: the command line imports this module whatever it is asked for.
        import aiohttp

        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def get(self, path: str) -> bytes:
        """The body of what the server answers."""
        async with self._answer("GET", path) as response:
            return await response.read()

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        """The body of what the server answers to a JSON body."""
        async with self._answer("POST", path, body) as response:
            return await response.read()

    async def models(self) -> list[str]:
        """The names of the models that the server has, its default first."""
        try:
            answer = msgspec.json.decode(await self.get("/v1/models"), type=_Models)
        except msgspec.DecodeError as error:
            raise ServerError(f"{self.root}/v1/models is no list of models: {error}") from error
        return [model.id for model in answer.data]

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[bytes]:
        """Each server-sent event's data, JSON as it came, up to [DONE].

        body must ask for a stream. Close the generator (aclose) to hang up before its end. Raises
        ServerError also for an error among the events, and for an end without [DONE].
        """
        reader = EventReader()
        async with self._answer("POST", path, body) as response:
            async for chunk in response.content.iter_any():
                for data in reader.feed(chunk):
                    if data == b"[DONE]":
                        # To the end, so that the connection can be used again.
                        await response.read()
                        return
                    # In JSON a text with quotes has backslashes in it, so this is rarely a false
                    # alarm, and far cheaper than to decode each event.
                    if b'"error"' in data and (message := _error_message(data)) is not None:
                        raise ServerError(f"{self.root}{path} failed while it answered: {message}")
                    yield data
        raise ServerError(f"{self.root}{path} ended its answer without [DONE]")

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> AsyncIterator["aiohttp.ClientResponse"]:
        """An answer whose status is no error. Its connection is closed unless all was read."""
        import aiohttp

        url = self.root + path
        headers = {} if body is None else {"Content-Type": "application/json"}
        content = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(method, url, data=content, headers=headers) as answer:
                if answer.status >= 400:
                    raise await _refusal(url, answer)
                yield answer
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            reason = "connection refused" if refused else error.os_error.strerror or error.os_error
            raise ServerError(
                f"{self.root} cannot be reached ({reason}): is a server running at this address?"
            ) from error
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError) as error:
            # Their texts are about the form in which the rest would have come.
            raise ServerError(
                f"{url} broke its answer off: the connection was closed, did the server end?"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"{url} broke its answer off: {reason}") from error


class EventReader:
    """Cuts a stream of bytes into the data of server-sent events, wherever its chunks are cut.

    Lines end with LF or CRLF. A lone CR, which the standard also allows, no such server sends.
    """

    def __init__(self) -> None:
        self._line_start = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that this chunk completes; comments and other fields are left
        out."""
        events = []
        lines = (self._line_start + chunk).split(b"\n")
        self._line_start = lines.pop()
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b" ", 5) else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events


def environment_api_key() -> str | None:
    """The key that the environment has for the server, HEADRACE_API_KEY. Not OPENAI_API_KEY: that
    is for OpenAI, and must not go to whatever address is given."""
    return os.environ.get("HEADRACE_API_KEY") or None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Error(msgspec.Struct):
    """OpenAI's shape, and that of older vLLMs, which have the message outside."""

    error: Any = None
    object: Any = None
    message: Any = None


def _error_message(body: bytes) -> str | None:
    """What an error in either shape says; None if the body is none."""
    try:
        answer = msgspec.json.decode(body, type=_Error)
    except msgspec.DecodeError:
        return None
    if isinstance(answer.error, dict):
        return str(answer.error.get("message") or answer.error)
    if answer.error is not None:
        return str(answer.error)
    return str(answer.message) if answer.object == "error" else None


async def _refusal(url: str, answer: "aiohttp.ClientResponse") -> ServerError:
    body = await answer.read()
    message = _error_message(body) or body.decode(errors="replace") or answer.reason or "no reason"
    message = " ".join(message.split())[:_MOST_SHOWN]
    if answer.status == 401:
        message += " (the key is taken from HEADRACE_API_KEY)"
    return ServerError(f"{url} answered {answer.status}: {message}", answer.status)


def _root(base_url: str) -> str:
    """Without the path that all of the interface's addresses share."""
    try:
        parts = urlsplit(base_url)
        # Looking at the port checks it.
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise UsageError(f"{base_url!r} is no server's address such as http://127.0.0.1:8000")
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")
