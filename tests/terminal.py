"""`headrace chat` on a terminal of its own, as somebody sits at it."""

import contextlib
import os
import pty
import re
import select
import subprocess
import sys

# What moves the cursor ahead, and whatever else it does, colours and modes (ECMA-48, 5.4).
_AHEAD = re.compile(r"\x08?\x1b\[\d*C")
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# What terminals send around a paste.
PASTE = "\x1b[200~{}\x1b[201~"


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
            # This terminal does not answer where its cursor is.
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
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
        while not all(text in self.text for text in texts):
            self._read_more(f"waiting for {texts}")

    def see_answer(self) -> None:
        """Wait until something was shown after the prompt, which asks for pastes no more; what
        shows the answer asks for them again."""
        while not self.shown.partition("\x1b[?2004l\x1b[?2004h")[2]:
            self._read_more("waiting for an answer")

    @property
    def text(self) -> str:
        """What was shown since the last key, without what steers the terminal."""
        return _CONTROL.sub("", _AHEAD.sub(" ", self.shown))

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
