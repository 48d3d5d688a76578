"""The address that the server has, taken before anything loads."""

import socket

from headrace.errors import StartError
from headrace.serving.settings import ServerSettings


def listen(settings: ServerSettings) -> socket.socket:
    """The listening socket. Raises StartError if the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # At once, not only when answers are given: two servers may bind, but only one may listen.
        listener.listen()
    except OSError as error:
        raise StartError(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror or error}): "
            "choose another --host or --port, or --port 0 for a free one"
        ) from error
    return listener


def url_of(settings: ServerSettings, listener: socket.socket) -> str:
    """Where clients of this machine reach it."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
