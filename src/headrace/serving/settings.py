"""What the server can be told, with vLLM's names where vLLM has them."""

from dataclasses import dataclass, field
from typing import Annotated

from headrace.errors import UsageError
from headrace.setting import Setting, check_settings, size_in_bytes

KEY_VARIABLE = "HEADRACE_API_KEY"
_DAY = 86_400
_CorsList = Annotated[tuple[str, ...], Setting("CORS, a JSON list.", json_list=True)]


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the server, apart from its engine's; its flags are made of it.

    Raises UsageError naming the flag. What has no flag: watch_loop: log what keeps the event loop
    from everybody else (loop_watch.py). max_connections: more than these are refused, as many as
    open files leave room for.
    """

    host: Annotated[str, Setting("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Setting("Port to listen on; 0: a free one.", least=0, most=65535)] = 8000
    api_keys: Annotated[
        tuple[str, ...],
        Setting(
            f"Key that requests must have; may be repeated. Better: {KEY_VARIABLE}.",
            flag="--api-key",
        ),
    ] = field(default=(), repr=False)
    shared_prefix_cache: Annotated[
        bool,
        Setting(
            "Requests of different keys share the prefix cache: each can tell by timing what "
            "others sent."
        ),
    ] = False
    served_model_names: Annotated[
        tuple[str, ...],
        Setting(
            "What requests call the model; may be repeated. Default: --model.",
            flag="--served-model-name",
        ),
    ]
    max_queued_requests: Annotated[
        int,
        Setting("Completions that may wait for a slot; more are refused with 429.", least=0),
    ] = 4096
    max_body_size: Annotated[int | str, Setting("Of a request, such as 16MiB.", size=True)] = (
        "16MiB"
    )
    read_timeout: Annotated[
        float,
        Setting("Seconds for a request's header, and its body, to arrive.", above=0, most=_DAY),
    ] = 30.0
    request_timeout: Annotated[
        float | None,
        Setting("Seconds for a whole answer; default: no limit.", above=0, most=_DAY),
    ] = None
    drain_timeout: Annotated[
        float,
        Setting("Seconds that running requests have after SIGTERM.", least=0, most=_DAY),
    ] = 30.0
    sse_keep_alive_interval: Annotated[
        float,
        Setting(
            "Seconds of silence in a stream before a comment line; 0: none.", least=0, most=_DAY
        ),
    ] = 15.0
    allowed_origins: _CorsList = ("*",)
    allowed_methods: _CorsList = ("*",)
    allowed_headers: _CorsList = ("*",)
    allow_credentials: Annotated[bool, Setting("CORS: let browsers send cookies.")] = False
    ssl_certfile: Annotated[str | None, Setting("Certificate: serve HTTPS.")] = None
    ssl_keyfile: Annotated[str | None, Setting("Its key, if it is not inside.")] = None
    watch_loop: bool = False
    max_connections: int = 1000

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.host:
            raise UsageError("--host must not be empty: 127.0.0.1, or 0.0.0.0 for all interfaces")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise UsageError(
                "--allow-credentials needs --allowed-origins: with * every site in a browser could "
                "use the API in its user's name"
            )
        # As headers bring it: nothing else could ever be equal to what a client sends.
        if any(not key or key != key.strip() or not key.isprintable() for key in self.api_keys):
            raise UsageError(
                f"an API key (--api-key, {KEY_VARIABLE}) must be printable, must not be empty and "
                "must not begin or end with a space"
            )
        if any(not name.strip() for name in self.served_model_names):
            raise UsageError("--served-model-name must not be empty")
        if (self.ssl_keyfile is not None) and self.ssl_certfile is None:
            raise UsageError("--ssl-keyfile needs --ssl-certfile, the certificate of that key")

    @property
    def max_body_bytes(self) -> int:
        """Bytes that a request's body may have."""
        return size_in_bytes(self.max_body_size)
