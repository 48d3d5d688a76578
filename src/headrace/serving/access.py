"""Who may use the API: those with a key, if there are keys."""

import hmac
from collections.abc import Callable
from contextvars import ContextVar
from hashlib import blake2b

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.serving.answers import LastResponse
from headrace.serving.api_errors import ApiError

# For probes and scrapers, which have no key; what they show says nothing of requests.
_OPEN = frozenset({"/health", "/version", "/metrics", "/docs", "/redoc", "/openapi.json"})


# Of the request that is being answered: what tells its caller from others in the prefix cache.
caller_salt: ContextVar[bytes] = ContextVar("caller_salt", default=b"")


class KeyCheck:
    """Lets requests with one of the keys pass (Authorization: Bearer KEY), and 401 the others.

    shared_cache: whether those with different keys find each other's tokens in the prefix cache.
    on_refusal: told the status of each that may not.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: tuple[str, ...],
        shared_cache: bool,
        on_refusal: Callable[[int], None],
    ) -> None:
        self._app = app
        self._on_refusal = on_refusal
        apart = len(set(keys)) > 1 and not shared_cache
        # By key, the salt of its requests.
        self._keys = {
            key.encode(): blake2b(key.encode(), digest_size=16).digest() if apart else b""
            for key in keys
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN or self._may_enter(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "no valid API key: send Authorization: Bearer KEY",
            code="invalid_api_key",
            unread=True,
        )
        self._on_refusal(error.status)
        response = LastResponse(error.as_json(), 401, error.headers(), "application/json")
        await response(scope, receive, send)

    def _may_enter(self, scope: Scope) -> bool:
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                kind, _, given = value.partition(b" ")
                if kind.lower() != b"bearer":
                    given = b""
        # All keys are compared, and each in constant time: how long it takes tells nothing.
        found = False
        for key, salt in self._keys.items():
            if hmac.compare_digest(given.strip(), key):
                found = True
                caller_salt.set(salt)
        return found
