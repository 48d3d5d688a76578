"""`headrace chat` on a terminal of its own, as somebody sits at it."""

import contextlib
import os
import pty
import select
import subprocess
import sys

import psutil

from command import wait_until


class Terminal:
    """What is typed there and what is seen. Ctrl-C is the byte 3, Ctrl-D the byte 4."""

    def __init__(self, *arguments: str) -> None:
        self.shown = ""
        self._ours, theirs = pty.openpty()
        # setsid makes the terminal the one that signals come from.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, "-m", "headrace", "chat", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(theirs)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def type(self, keys: str) -> None:
        """Press keys; what was shown before is looked at no more."""
        self.shown = ""
        os.write(self._ours, keys.encode())

    def see(self, *texts: str) -> None:
        """Wait until all these were shown since the last key."""
        while not all(text in self.shown for text in texts):
            self._read_more(f"waiting for {texts}")

    def see_answer(self, message: str) -> None:
        """Wait until something was shown below the message, which the terminal shows as typed."""
        while not self.shown.partition(message + "\r\n")[2]:
            self._read_more("waiting for an answer")

    def rest(self) -> None:
        """Wait until the program waits for a key. Readline shows its prompt a moment before, and in
        that moment CPython notices a signal only with the next key (readline.c, at select)."""
        process = psutil.Process(self.process.pid)
        wait_until(lambda: process.status() == psutil.STATUS_SLEEPING)

    def end(self) -> int:
        """Read up to the end; returns the exit code."""
        with contextlib.suppress(OSError):
            while True:
                self._read_more("waiting for the end")
        return self.process.wait(30)

    def _read_more(self, what: str) -> None:
        readable, _, _ = select.select([self._ours], [], [], 60)
        assert readable, f"{what}, but this is all: {self.shown!r}"
        self.shown += os.read(self._ours, 4096).decode(errors="replace")
