"""The server's life: it listens, loads, serves, drains and ends."""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator

import uvicorn
import uvloop

from headrace.async_llm import AsyncLLM
from headrace.errors import StartError, UsageError
from headrace.serving.app import make_app
from headrace.serving.connection import with_timeout
from headrace.serving.service import Service
from headrace.serving.settings import ServerSettings

_log = logging.getLogger(__name__)

# Seconds that a connection without a request is kept, longer than clients' pools keep theirs.
_KEEP_ALIVE_S = 75
# Seconds for answers that were cut to reach their clients.
_LAST_WORDS_S = 2
_SAMPLE_S = 1.0


class _Interrupted(Exception):
    """The server was told to end before its engine was there."""


class _Uvicorn(uvicorn.Server):
    """Without uvicorn's signal handlers: this module has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(settings: ServerSettings) -> socket.socket:
    """The listening socket. Raises StartError if the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
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


def run_server(
    settings: ServerSettings,
    listener: socket.socket,
    on_listening: Callable[[], None],
    load: Callable[[Callable[[], None]], AsyncLLM],
    on_ready: Callable[[AsyncLLM], None],
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. A second signal ends what still runs.

    on_listening: called once nothing is wrong with the settings. load: gives the engine, in a
    thread; it is given what to call while it loads, which raises if the server is to end. on_ready:
    called once requests are answered. Raises what load raises, and the engine's error if it breaks.
    """
    service = Service(settings)
    server = _Uvicorn(_uvicorn_config(service))
    on_listening()
    uvloop.run(_run(service, server, listener, load, on_ready))


def _uvicorn_config(service: Service) -> uvicorn.Config:
    settings = service.settings
    config = uvicorn.Config(
        make_app(service),
        http=with_timeout(settings.read_timeout),
        ws="none",
        lifespan="off",
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        key = f" with --ssl-keyfile {settings.ssl_keyfile}" if settings.ssl_keyfile else ""
        raise UsageError(
            f"--ssl-certfile {settings.ssl_certfile}{key} cannot be used: {error.strerror or error}"
        ) from error
    return config


async def _run(
    service: Service,
    server: uvicorn.Server,
    listener: socket.socket,
    load: Callable[[Callable[[], None]], AsyncLLM],
    on_ready: Callable[[AsyncLLM], None],
) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def end() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    loop = asyncio.get_running_loop()

    def on_signal(number: int, frame: object) -> None:
        # Not the loop's own handlers, which end with it: a signal after that would kill.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(end)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    answering = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        engine = await _load(load, stop)
        if engine is None:
            return
        try:
            service.attach(engine)
            on_ready(engine)
            await _serve(service, engine, stop)
            if engine.error is None:
                await _drain(service, hurry)
            if engine.error is not None:
                raise engine.error
        finally:
            service.draining = True
            await asyncio.to_thread(engine.close)
    finally:
        server.should_exit = True
        last_words = loop.call_later(_LAST_WORDS_S, _cut_connections, server)
        await answering
        last_words.cancel()


async def _load(
    load: Callable[[Callable[[], None]], AsyncLLM], stop: asyncio.Event
) -> AsyncLLM | None:
    """The engine, or None if the server was to end before it was there."""

    def check() -> None:
        if stop.is_set():
            raise _Interrupted

    try:
        engine = await asyncio.to_thread(load, check)
    except _Interrupted:
        return None
    if stop.is_set():
        await asyncio.to_thread(engine.close)
        return None
    return engine


def _cut_connections(server: uvicorn.Server) -> None:
    """End those of clients that do not read, or still send: uvicorn would wait for them."""
    for connection in list(server.server_state.connections):
        connection.transport.abort()


async def _serve(service: Service, engine: AsyncLLM, stop: asyncio.Event) -> None:
    """Until the server is to end, or its engine has."""
    ending = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(engine.ended())]
    try:
        while not any(task.done() for task in ending):
            service.metrics.sample()
            await asyncio.wait(ending, timeout=_SAMPLE_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in ending:
            task.cancel()


async def _drain(service: Service, hurry: asyncio.Event) -> None:
    """Let what runs end, but take nothing new."""
    service.draining = True
    started = time.monotonic()
    timeout = service.settings.drain_timeout
    if not service.quiet.is_set():
        _log.info("draining: requests that run have %g s to end", timeout)
    waiting = [asyncio.ensure_future(event.wait()) for event in (service.quiet, hurry)]
    try:
        await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    if not service.quiet.is_set():
        _log.warning("requests that still ran after %.1f s were cut", time.monotonic() - started)
