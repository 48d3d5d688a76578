"""Errors as the OpenAI API shapes them.

Source: https://platform.openai.com/docs/guides/error-codes
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from headrace.errors import HeadraceError, UsageError

# The API's word for each status that this server gives.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}


# Characters of a message or a field's name, which may quote what the client sent.
_LONGEST = 2000


class ApiError(Exception):
    """An answer that is an error. param: the field at fault; code: for programs to look at.

    unread: the rest of the request is on its way, so the connection has to end. headers: of the
    answer, besides those that follow from its status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        unread: bool = False,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.unread = unread
        self._headers = headers

    def as_json(self) -> bytes:
        """The body of the answer, or the data of an event in a stream."""
        return error_json(self.status, self.message, self.param, self.code)

    def headers(self) -> dict[str, str]:
        """Of the answer, besides its type and length."""
        found = dict(self._headers)
        if self.unread:
            found["connection"] = "close"
        if self.status in (429, 503):
            found["retry-after"] = "1"
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found


def error_json(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> bytes:
    """An error object, encoded."""
    message, param = _shortened(message), None if param is None else _shortened(param)
    error: dict[str, Any] = {
        "message": message,
        "type": _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"),
        "param": param,
        "code": code,
    }
    return msgspec.json.encode({"error": error})


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def as_api_error(
    error: HeadraceError, fields: Mapping[str, str] = MappingProxyType({})
) -> ApiError:
    """How a client is told of an error. fields: the engine's names, with what the request calls
    them; one of them may be to blame: the engine's messages begin with it then."""
    message = " ".join(str(error)[: 2 * _LONGEST].split())
    if isinstance(error, UsageError):
        first = message.split(" ", 1)[0].rstrip(":")
        if first in fields:
            own = fields[first]
            return ApiError(400, own + message[len(first) :], param=own)
        return ApiError(400, message)
    return ApiError(500, message)


INTERNAL = ApiError(500, "internal error: see the server's log")
