"""A rank's process on another host, as the engine's host has it."""

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from headrace.signals import put_off


class RemoteProcess:
    """A rank's process on another host, with what is used of subprocess.Popen.

    address, watch_address: of its two sockets, in the engine's folder. death: readable once it has
    ended. last_line: that it wrote.
    """

    # No process of this host.
    pid = 0

    def __init__(self, rank: int, life: int, folder: Path, kill: Callable[[], None]) -> None:
        self.rank, self.life = rank, life
        # A name is used once: zmq removes a socket's file long after it was closed.
        self.address = f"ipc://{folder}/rank-{rank}-{life}"
        self.watch_address = f"ipc://{folder}/watch-{rank}-{life}"
        self.returncode: int | None = None
        self.last_line = ""
        # A file object: once closed, its number cannot be mistaken for another file's.
        self.death = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")
        self._ended = threading.Event()
        self._kill = kill

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        return self.returncode

    def wait(self) -> int:
        """Its exit code, once it has ended. For one that was killed: signals are put off."""
        with put_off():
            self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """End it at once."""
        if self.returncode is None:
            self._kill()

    def leave(self) -> None:
        """Watch it no more."""
        self.death.close()

    def end(self, code: int, last_line: str) -> None:
        """It has ended: called by the thread."""
        if self.returncode is None:
            self.returncode, self.last_line = code, last_line
            with contextlib.suppress(ValueError):
                self.death.write((1).to_bytes(8, sys.byteorder))
            self._ended.set()
