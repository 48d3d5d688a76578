"""The real server on real sockets, over an engine whose answers a test hands out one by one."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import uvicorn

from command import wait_until
from headrace.async_llm import AsyncLLM
from headrace.checkpoint.synthetic import synthetic_tokenizer
from headrace.config import EngineConfig
from headrace.deployment.recovery import RecoveryStatus
from headrace.deployment.virtual import launch_virtual
from headrace.engine.outputs import OutputDelta
from headrace.engine.prepared import Prepared
from headrace.engine.request import FinishReason
from headrace.engine_thread import EngineThread, Submission
from headrace.serving.app import make_app
from headrace.serving.backlog import Backlog
from headrace.serving.connection import with_limits
from headrace.serving.service import Service
from headrace.serving.settings import ServerSettings

SLOTS = 4


def delta(index: int, text: str, reason: FinishReason | None = None) -> OutputDelta:
    now = time.monotonic()
    return OutputDelta(0, index, 1, text, reason, None, None, None, 0, now, now, now)


class HandedOut:
    """In place of an AsyncLLM: what it takes on waits for the test."""

    def __init__(self) -> None:
        virtual = launch_virtual(EngineConfig(model="synthetic:1+0"))
        self.error = None
        self.card = replace(virtual.card, max_model_len=8192, max_num_seqs=SLOTS)
        self.tokenizer = synthetic_tokenizer()
        self.snapshot = virtual.engine.snapshot
        self.recovery = RecoveryStatus()
        self.detokenizer, self.reader = virtual.engine.detokenizer, virtual.engine.reader
        self.submissions: list[Submission] = []
        self.aborted: list[Submission] = []

    async def submit(
        self, prompts: Any, params: Any, *, priority: int, salt: bytes, on_arrival: Any
    ) -> Any:
        thread = cast(EngineThread, self)
        prepared = cast(Prepared, SimpleNamespace(params=params))
        submission = Submission(thread, prompts, prepared, priority, salt, on_arrival)
        submission.accept()
        self.submissions.append(submission)
        return submission

    def abort(self, submission: Submission) -> None:
        self.aborted.append(submission)


class Served:
    """The server, in a thread of this process."""

    def __init__(self, service: Service, engine: HandedOut, address: tuple[str, int]) -> None:
        self.service = service
        self.engine = engine
        self.address = address

    def hand_out(self, number: int, deltas: list[OutputDelta]) -> int:
        """To the request of this number, as the engine's thread does; the bytes that are held for
        all of them then."""
        submission = self.engine.submissions[number]
        held: Future[int] = Future()

        def take() -> None:
            submission.take(0, deltas)
            held.set_result(self.service.backlog.bytes)

        submission.loop.call_soon_threadsafe(take)
        return held.result(60)

    def ask(self, path: str, body: bytes) -> socket.socket:
        """A connection on which this was asked, once the engine has it; little of an answer finds
        room in it."""
        before = len(self.engine.submissions)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(self.address)
        connection.sendall(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
        )
        wait_until(lambda: len(self.engine.submissions) > before)
        return connection


@contextmanager
def served(most_held: int = 2**30, **settings: Any) -> Iterator[Served]:
    """most_held: bytes of the backlog."""
    engine = HandedOut()
    service = Service(ServerSettings(served_model_names=("m",), **settings))
    service.backlog = Backlog(most_held, service.metrics.cut)
    service.attach(cast(AsyncLLM, engine))
    config = uvicorn.Config(
        make_app(service), http=with_limits(60.0, 1000), ws="none", lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        run = server.serve(sockets=[listener])
        thread = threading.Thread(target=lambda: asyncio.run(run))
        thread.start()
        try:
            yield Served(service, engine, listener.getsockname())
        finally:
            server.should_exit = True
            thread.join()
