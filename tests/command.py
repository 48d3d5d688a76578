"""The headrace command as a real process, and what it leaves behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Mark:
    """An environment variable that processes inherit, by which they are found."""

    name: str = "HEADRACE_TEST_MARK"
    value: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def variable(self) -> tuple[str, str]:
        return self.name, self.value

    def processes(self) -> list[int]:
        """Living processes that were started with this mark."""
        mark, found = f"{self.name}={self.value}\0".encode(), []
        for pid in psutil.pids():
            # Not by psutil, which reads no further than a process has written its own title there.
            with suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return sorted(found)


@dataclass
class Command:
    """A running `headrace`; every process it starts inherits a mark of its own."""

    arguments: list[str]
    stdin: bytes = b""
    environment: dict[str, str] = field(default_factory=dict)
    # What starts it, such as nohup.
    prefix: list[str] = field(default_factory=list)
    # What Python runs: headrace itself, or a program that interferes with it.
    program: list[str] = field(default_factory=lambda: ["-m", "headrace"])
    mark: Mark = field(default_factory=Mark, init=False)
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [*self.prefix, sys.executable, *self.program, *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **self.environment, self.mark.name: self.mark.value},
        )

    def finish(self, timeout_s: float = 100.0) -> "Finished":
        """Wait for the command and for the last of its processes."""
        try:
            out, err = self.process.communicate(self.stdin, timeout_s)
        finally:
            self.process.kill()
        return Finished(self.process.returncode, out.decode(), err.decode(), self.processes())

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def processes(self) -> list[int]:
        """Living processes with this command's mark, its own first."""
        return sorted(self.mark.processes(), key=lambda pid: (pid != self.process.pid, pid))

    def stages(self) -> list[int]:
        """Process ids of the stages, first stage first."""
        children = psutil.Process(self.process.pid).children()
        stages = [c for c in children if "headrace.pipeline.stage_process" in c.cmdline()]
        return [c.pid for c in sorted(stages, key=lambda c: c.cmdline()[-1])]


@dataclass(frozen=True)
class Finished:
    """What a command printed, and the processes still there afterwards."""

    code: int
    out: str
    err: str
    left: list[int]


def run(*arguments: str, stdin: bytes = b"", **environment: str) -> Finished:
    return Command(list(arguments), stdin, environment).finish()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Poll until condition holds; AssertionError if it never does."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, "it did not happen in time"
        time.sleep(0.01)
