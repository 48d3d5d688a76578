"""Reads a request's body: its size, its time, its type, and what is in it."""

import asyncio
import contextlib
import difflib
import re
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from starlette.requests import Request

from headrace.serving.answers import ClientGone
from headrace.serving.api_errors import ApiError
from headrace.serving.body_work import SMALL, check_work
from headrace.serving.lenient import lenient
from headrace.serving.requests import Body
from headrace.serving.settings import ServerSettings

_Body = TypeVar("_Body", bound=Body)

# Bodies of the largest size that may be in memory at once, of all connections.
MOST_BODIES = 16
# Names longer than this are no misspelt fields, and only their beginning is repeated.
_LONGEST_NAME = 100
# Of msgspec's words, which may quote what was sent: first what is wrong, at the end where it is.
_LONGEST_WORDS = 1000

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.(?P<path>.*)`)?")
_WRONG = re.compile(r"(?P<what>.*?) - at `(?:key` in `)?\$\.?(?P<path>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*?)`")


class Bodies:
    """Reads the bodies of all requests, which together have a bound."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        # Bytes that came, until what they ask for runs or was refused: texts wait to be tokenized.
        self._held = 0
        # Large ones are weighed and decoded one after the other: each piece of one takes its turn
        # in the event loop, and together they would take all of them.
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def of(self, request: Request, kind: type[_Body]) -> AsyncIterator[_Body]:
        """A body as an object of this kind, which counts within. Raises ApiError for what is wrong
        with it."""
        _check_type(request)
        data = bytearray()
        try:
            await self._receive(request, data)
            if not data:
                raise ApiError(400, "there is no body: send a JSON object")
            if len(data) <= SMALL:
                body = decoded(data, kind)
            else:
                async with self._turn:
                    await check_work(data)
                    body = decoded(data, kind)
            yield body
        finally:
            self._held -= len(data)

    async def _receive(self, request: Request, data: bytearray) -> None:
        limit = self._settings.max_body_bytes
        if int(request.headers.get("content-length", "0")) > limit:
            raise _too_large(limit, unread=True)
        try:
            async with asyncio.timeout(self._settings.read_timeout):
                while True:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    data += message["body"]
                    self._held += len(message["body"])
                    if len(data) > limit:
                        raise _too_large(limit, unread=message["more_body"])
                    # Those who ask for a little are not shut out by those who ask for much.
                    if self._held > MOST_BODIES * limit and len(data) > SMALL:
                        raise ApiError(
                            503,
                            f"requests of {MOST_BODIES * limit} bytes are arriving already: try "
                            "again later",
                            code="bodies_full",
                            unread=message["more_body"],
                        )
                    if not message["more_body"]:
                        return
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {self._settings.read_timeout:g} s",
                unread=True,
            ) from None


def _too_large(limit: int, unread: bool) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than the {limit} bytes that --max-body-size allows",
        unread=unread,
    )


def _check_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    if given.split(";", 1)[0].strip().lower() != "application/json":
        raise ApiError(
            415,
            f"the content type must be application/json, not {given[:100]!r}: "
            "send the header Content-Type: application/json",
            unread=True,
        )


def decoded(data: bytearray, kind: type[_Body]) -> _Body:
    """The body as an object. Raises ApiError naming what is wrong with it."""
    try:
        body = _converted(data, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is no valid JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    for name, allowed in kind.UNSUPPORTED.items():
        value = getattr(body, name)
        # 1 equals True, but they do not ask for the same.
        if not any(value == other and type(value) in _alike(other) for other in allowed):
            values = " or ".join(msgspec.json.encode(v).decode() for v in allowed if v is not None)
            hint = f", or give {values}" if values else ""
            raise ApiError(400, f"{name} is not supported: leave it out{hint}", param=name)
    return body


def _converted(data: bytearray, kind: type[_Body]) -> _Body:
    """The object, with numbers that were written in another way if it is none as it stands."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        # No field is read in another way that is not there.
        if str(error).startswith("Object "):
            raise
        try:
            values = msgspec.json.decode(data)
        except msgspec.ValidationError:
            # Numbers without end, whose field only the first error names.
            raise error from None
    return msgspec.convert(lenient(values, kind), kind, str_keys=True)


def _invalid(text: str, kind: type[Body]) -> ApiError:
    """msgspec's message in the words of the API, naming the field."""
    if len(text) > _LONGEST_WORDS:
        text = text[: _LONGEST_WORDS // 2] + "..." + text[-_LONGEST_WORDS // 2 :]
    if found := _UNKNOWN.match(text):
        name, path = found["name"], found["path"]
        where = _shortened(f"{path}.{name}" if path else name)
        close = []
        if not path and len(name) <= _LONGEST_NAME:
            close = difflib.get_close_matches(name, kind.__struct_fields__, 1)
        hint = f": did you mean {close[0]}?" if close else ""
        return ApiError(
            400, f"there is no field {where}, or it is not supported{hint}", param=where
        )
    wrong = _WRONG.fullmatch(text)
    what, path = (wrong["what"], wrong["path"]) if wrong else (text, "")
    what, path = _shortened(what), _shortened(path)
    if found := _MISSING.match(what):
        where = f"{path}.{found['name']}" if path else found["name"]
        return ApiError(400, f"{where} is missing", param=where)
    if path.startswith("messages[") and path.endswith("].type"):
        return ApiError(400, f"{path}: only text is supported ({what})", param=path)
    return ApiError(400, f"{path or 'the body'}: {what}", param=path or None)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_NAME else text[:_LONGEST_NAME] + "..."


def _alike(value: object) -> tuple[type, ...]:
    return (int, float) if type(value) in (int, float) else (type(value),)
