"""What the server can be told, with vLLM's names where vLLM has them."""

import json
from dataclasses import dataclass, field

from headrace.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the server, apart from its engine's. Raises UsageError naming the flag.

    port: 0 picks a free one. api_keys: any of them opens the API; none: it is open.
    served_model_names: what requests may call the model; answers have the one asked for, or the
    first.
    shared_prefix_cache: whether requests find in the prefix cache what requests with other keys
    sent.
    max_queued_requests: completions that may wait for a slot before more are refused.
    max_body_bytes: of a request. read_timeout: seconds for a request's header, and for its body,
    to arrive. request_timeout: seconds for a whole answer, None for any. drain_timeout: seconds
    for running requests to end once the server is to. sse_keep_alive_interval: seconds of silence
    in a stream before a comment, 0 for none.
    allowed_origins, _methods, _headers: what browsers on other sites may do (CORS).
    max_connections: more than these are refused, as many as open files leave room for.
    watch_loop: log what keeps the event loop from everybody else (loop_watch.py).
    """

    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    shared_prefix_cache: bool = False
    max_queued_requests: int = 4096
    max_body_bytes: int = 16 * 2**20
    read_timeout: float = 30.0
    request_timeout: float | None = None
    drain_timeout: float = 30.0
    sse_keep_alive_interval: float = 15.0
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    watch_loop: bool = False
    max_connections: int = 1000

    def __post_init__(self) -> None:
        if not self.host:
            raise UsageError("--host must not be empty: 127.0.0.1, or 0.0.0.0 for all interfaces")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise UsageError(
                "--allow-credentials needs --allowed-origins: with * every site in a browser could "
                "use the API in its user's name"
            )
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port must be from 0 to 65535, not {self.port}")
        if self.max_queued_requests < 0:
            raise UsageError(
                f"--max-queued-requests must be at least 0, not {self.max_queued_requests}"
            )
        if self.max_body_bytes < 1:
            raise UsageError("--max-body-size must be at least 1 byte")
        for flag, value in (
            ("--read-timeout", self.read_timeout),
            ("--request-timeout", self.request_timeout),
        ):
            if value is not None and not 0 < value <= 86_400:
                raise UsageError(f"{flag} must be above 0 and at most 86400, not {value}")
        for flag, value in (
            ("--drain-timeout", self.drain_timeout),
            ("--sse-keep-alive-interval", self.sse_keep_alive_interval),
        ):
            if not 0 <= value <= 86_400:
                raise UsageError(f"{flag} must be from 0 to 86400, not {value}")
        # As headers bring it: nothing else could ever be equal to what a client sends.
        if any(not key or key != key.strip() or not key.isprintable() for key in self.api_keys):
            raise UsageError(
                "an API key (--api-key, HEADRACE_API_KEY) must be printable, must not be empty and "
                "must not begin or end with a space"
            )
        if any(not name.strip() for name in self.served_model_names):
            raise UsageError("--served-model-name must not be empty")
        if (self.ssl_keyfile is not None) and self.ssl_certfile is None:
            raise UsageError("--ssl-keyfile needs --ssl-certfile, the certificate of that key")


def parse_list(flag: str, text: str) -> tuple[str, ...]:
    """The texts of a JSON list, as vLLM's CORS flags take them. Raises UsageError naming flag."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError(f"""{flag} must be a JSON list of texts such as '["*"]', not {text!r}""")
    return tuple(value)
