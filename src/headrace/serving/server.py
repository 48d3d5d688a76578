"""The server's life: it listens, loads, serves, drains and ends."""

import asyncio
import contextlib
import gc
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
import uvloop

from headrace.async_llm import AsyncLLM
from headrace.errors import UsageError
from headrace.serving.app import make_app
from headrace.serving.connection import with_limits
from headrace.serving.loading import EngineLoader
from headrace.serving.loop_watch import watched
from headrace.serving.service import Service
from headrace.serving.settings import ServerSettings
from headrace.signals import EndingSignals

_log = logging.getLogger(__name__)

# Seconds that a connection without a request is kept, longer than clients' pools keep theirs.
_KEEP_ALIVE_S = 75
# Seconds for answers that were cut to reach their clients.
_LAST_WORDS_S = 2
_SAMPLE_S = 1.0
_LOOK_S = 0.1


class _Uvicorn(uvicorn.Server):
    """Without uvicorn's signal handlers: this module has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_server(
    settings: ServerSettings,
    listener: socket.socket,
    loader: EngineLoader,
    signals: EndingSignals,
    on_listening: Callable[[], None],
    on_ready: Callable[[AsyncLLM], None],
) -> None:
    """Serve until a signal comes, then drain. A second one ends what still runs.

    loader: closed in the end. on_listening: called once nothing is wrong with the settings;
    on_ready: once requests are answered. Raises what loading raises, and the engine's error if it
    breaks.
    """
    service = Service(settings)
    server = _Uvicorn(_uvicorn_config(service))
    on_listening()
    life = _run(service, server, listener, loader, signals, on_ready)
    uvloop.run(watched(life) if settings.watch_loop else life)


def _uvicorn_config(service: Service) -> uvicorn.Config:
    settings = service.settings
    config = uvicorn.Config(
        make_app(service),
        http=with_limits(settings.read_timeout, settings.max_connections),
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
    loader: EngineLoader,
    signals: EndingSignals,
    on_ready: Callable[[AsyncLLM], None],
) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def end() -> None:
        stop.set()
        if len(signals.numbers) > 1:
            hurry.set()

    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        # After the loop's end there is nothing left to tell.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(end)

    signals.tell(on_signal)
    answering = asyncio.create_task(server.serve(sockets=[listener]))
    sampling = asyncio.create_task(_sample(service))
    # When what still travels is cut.
    deadline = loop.time()
    try:
        if (engine := await _loaded(loader, stop)) is not None:
            service.attach(engine)
            # What is there now stays: the collector would walk through it for 60 ms, again and
            # again, while everybody waits.
            gc.collect()
            gc.freeze()
            on_ready(engine)
            await _first(stop.wait(), engine.ended(), answering)
            if engine.error is None and not answering.done():
                deadline = loop.time() + service.settings.drain_timeout
                await _drain(service, hurry)
            if hurry.is_set():
                deadline = loop.time()
            if engine.error is not None:
                raise engine.error
    finally:
        service.draining = True
        await asyncio.to_thread(loader.close)
        server.should_exit = True
        cutting = asyncio.create_task(_cut_connections(server, deadline))
        await answering
        for task in (sampling, cutting):
            task.cancel()


async def _loaded(loader: EngineLoader, stop: asyncio.Event) -> AsyncLLM | None:
    """The engine, or None if the server is to end before it is there."""
    loading = asyncio.ensure_future(loader.engine())
    await _first(loading, stop.wait())
    if stop.is_set():
        loading.cancel()
        return None
    return loading.result()


async def _sample(service: Service) -> None:
    while True:
        service.metrics.sample()
        await asyncio.sleep(_SAMPLE_S)


async def _cut_connections(server: uvicorn.Server, deadline: float) -> None:
    """End connections that uvicorn would wait for: of clients that still send or do nothing after
    a moment, of those that still take their answer at the deadline."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(_LAST_WORDS_S)
    while True:
        for connection in list(server.server_state.connections):
            if loop.time() >= deadline or not connection.transport.get_write_buffer_size():
                connection.transport.abort()
        await asyncio.sleep(_LOOK_S)


async def _drain(service: Service, hurry: asyncio.Event) -> None:
    """Let what runs end, but take nothing new."""
    service.draining = True
    started = time.monotonic()
    timeout = service.settings.drain_timeout
    if not service.quiet.is_set():
        _log.info("draining: requests that run have %g s to end", timeout)
    await _first(service.quiet.wait(), hurry.wait(), timeout=timeout)
    if not service.quiet.is_set():
        _log.warning("requests that still ran after %.1f s were cut", time.monotonic() - started)


async def _first(*awaitables: Awaitable[object], timeout: float | None = None) -> None:
    """Wait until one of them is there, for so many seconds at most; forget the others."""
    waiting = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    own = [task for task, given in zip(waiting, awaitables, strict=True) if task is not given]
    try:
        await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in own:
            task.cancel()
