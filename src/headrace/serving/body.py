"""Reads a request's body: its size, its time, its type, and what is in it."""

import asyncio
import difflib
import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from headrace.serving.answers import ClientGone
from headrace.serving.errors import ApiError
from headrace.serving.requests import Body
from headrace.serving.settings import ServerSettings

_Body = TypeVar("_Body", bound=Body)

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.(?P<path>.*)`)?")
_WRONG = re.compile(r"(?P<what>.*?) - at `(?:key` in `)?\$\.?(?P<path>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*?)`")


async def read_body(request: Request, kind: type[_Body], settings: ServerSettings) -> _Body:
    """The body as an object of this kind. Raises ApiError for what is wrong with it."""
    _check_type(request)
    data = await _read(request, settings)
    if not data:
        raise ApiError(400, "there is no body: send a JSON object")
    try:
        body = msgspec.json.decode(data, type=kind)
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


def _check_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    if given.split(";", 1)[0].strip().lower() != "application/json":
        raise ApiError(
            415,
            f"the content type must be application/json, not {given[:100]!r}: "
            "send the header Content-Type: application/json",
            unread=True,
        )


async def _read(request: Request, settings: ServerSettings) -> bytes:
    limit = settings.max_body_bytes
    too_large = ApiError(
        413, f"the body is larger than the {limit} bytes that --max-body-size allows", unread=True
    )
    if int(request.headers.get("content-length", "0")) > limit:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(settings.read_timeout):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                data += message["body"]
                if len(data) > limit:
                    too_large.unread = message["more_body"]
                    raise too_large
                if not message["more_body"]:
                    return bytes(data)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {settings.read_timeout:g} s", unread=True
        ) from None


def _invalid(text: str, kind: type[Body]) -> ApiError:
    """msgspec's message in the words of the API, naming the field."""
    if found := _UNKNOWN.match(text):
        name, path = found["name"], found["path"]
        where = f"{path}.{name}" if path else name
        close = [] if path else difflib.get_close_matches(name, kind.__struct_fields__, 1)
        hint = f": did you mean {close[0]}?" if close else ""
        return ApiError(
            400, f"there is no field {where}, or it is not supported{hint}", param=where
        )
    wrong = _WRONG.fullmatch(text)
    what, path = (wrong["what"], wrong["path"]) if wrong else (text, "")
    if found := _MISSING.match(what):
        where = f"{path}.{found['name']}" if path else found["name"]
        return ApiError(400, f"{where} is missing", param=where)
    if path.startswith("messages[") and path.endswith("].type"):
        return ApiError(400, f"{path}: only text is supported ({what})", param=path)
    return ApiError(400, f"{path or 'the body'}: {what}", param=path or None)


def _alike(value: object) -> tuple[type, ...]:
    return (int, float) if type(value) in (int, float) else (type(value),)
