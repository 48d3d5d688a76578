"""Where the weights of this host's ranks lie: with the model, or where they are received.

A rank whose weights have to come has a thread that receives them, and its process starts when they
are here. Ranks of one host take turns.
"""

import io
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass

import msgspec

from headrace.errors import HeadraceError, PipelineError
from headrace.host.cluster_key import Secret
from headrace.host.user_cache import user_cache
from headrace.pipeline.weights_receiver import Received, Source, receive_weights
from headrace.protocol.program import Program

# Seconds between two words on how far it is.
_TELL_S = 0.5


@dataclass(frozen=True)
class RankLife:
    """A process of a rank, by the rank's number and how many there were before."""

    rank: int
    life: int


@dataclass(frozen=True)
class Found:
    """A rank's weights are here. path: of the model, as the rank loads it. received: where they had
    to come."""

    of: RankLife
    path: str
    received: Received | None = None


@dataclass(frozen=True)
class Coming:
    """A rank's weights are on their way. fraction: of them that is here, from 0 to 1."""

    of: RankLife
    fraction: float


@dataclass(frozen=True)
class Missing:
    """A rank's weights cannot be had."""

    of: RankLife
    error: HeadraceError


class _OverError(Exception):
    """Nobody wants the weights any more."""


@dataclass(frozen=True)
class _Fetch:
    thread: threading.Thread
    over: threading.Event


class RankWeights:
    """model_path: where the model lies here, None if it does not. Always close() it."""

    def __init__(self, secret: Secret) -> None:
        """secret: the cluster's."""
        self.model_path: str | None = None
        self._secret = secret
        self._fetches: dict[RankLife, _Fetch] = {}
        # What came, by the program that it is for: a rank that starts anew loses no time.
        self._received: dict[bytes, str] = {}
        self._news: queue.SimpleQueue[Found | Coming | Missing] = queue.SimpleQueue()
        # A file object: once closed, its number cannot be mistaken for another file's.
        self._wake = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")

    def fileno(self) -> int:
        """Readable when there is news."""
        return self._wake.fileno()

    def find(self, of: RankLife, program: Program, sender: str) -> None:
        """Begin to look; news() tells. sender: the address of one who has them, if any."""
        path = self.model_path or self._received_before(program)
        if path is not None:
            self._tell(Found(of, path))
            return
        over = threading.Event()
        thread = threading.Thread(
            target=self._fetch, args=(of, program, sender, over), name=f"weights of rank {of.rank}"
        )
        self._fetches[of] = _Fetch(thread, over)
        thread.start()

    def cancel(self, of: RankLife) -> None:
        """Receive them no further; what came stays."""
        if (fetch := self._fetches.get(of)) is not None:
            fetch.over.set()

    def news(self) -> list[Found | Coming | Missing]:
        """What has happened since the last call; of processes that were cancelled, too."""
        if self._wake.read(8) is None:
            return []
        told = []
        while not self._news.empty():
            told.append(self._news.get())
        return told

    def close(self) -> None:
        """Receive nothing any more."""
        for fetch in self._fetches.values():
            fetch.over.set()
        for fetch in self._fetches.values():
            fetch.thread.join()
        self._wake.close()

    def _received_before(self, program: Program) -> str | None:
        """Where, unless somebody removed it since."""
        path = self._received.get(msgspec.msgpack.encode(program))
        return path if path is not None and os.path.exists(path) else None

    def _tell(self, news: Found | Coming | Missing) -> None:
        self._news.put(news)
        self._wake.write((1).to_bytes(8, sys.byteorder))

    # In a thread.

    def _fetch(self, of: RankLife, program: Program, sender: str, over: threading.Event) -> None:
        told_at = 0.0

        def check() -> None:
            if over.is_set():
                raise _OverError

        def tell(fraction: float) -> None:
            nonlocal told_at
            if fraction == 1 or time.monotonic() - told_at > _TELL_S:
                told_at = time.monotonic()
                self._tell(Coming(of, fraction))

        try:
            folder = user_cache() / "weights"
            received = receive_weights(Source(sender, self._secret), program, folder, tell, check)
        except _OverError:
            return
        except HeadraceError as error:
            self._tell(Missing(of, error))
        except Exception as error:
            words = f"internal error: {type(error).__name__}: {error}"
            self._tell(Missing(of, PipelineError(words)))
        else:
            path = str(received.files.path)
            self._received[msgspec.msgpack.encode(program)] = path
            self._tell(Found(of, path, received))
