"""An engine's host and others, all on loopback: each other one is an agent's process."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass
class Agent:
    """`headrace join`, or another command that takes part. lines: what it printed so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def ranks(self) -> list[psutil.Process]:
        """Those that run there."""
        children = psutil.Process(self.process.pid).children()
        return [c for c in children if "headrace.pipeline.stage_process" in c.cmdline()]

    def end(self, timeout_s: float = 30.0) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(timeout_s)


@contextmanager
def agents(
    count: int,
    port: int,
    key: Path,
    arguments: Sequence[str] = (),
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[list[Agent]]:
    """So many that join at a port of loopback. folder: where they start, None for here.
    environment: variables besides this process's. None is left afterwards."""
    command = ["join", f"127.0.0.1:{port}", "--cluster-key-file", str(key), *arguments]
    started = [start(command, folder, environment) for _ in range(count)]
    try:
        yield started
    finally:
        for agent in started:
            agent.process.kill()
            agent.process.wait()


def start(
    command: Sequence[str],
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Agent:
    """A headrace command whose output is read all the while. folder, environment: as of agents."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, **(environment or {})},
    )
    agent = Agent(process)
    threading.Thread(target=_read, args=(agent,), daemon=True).start()
    return agent


def _read(agent: Agent) -> None:
    assert agent.process.stdout is not None
    agent.lines.extend(line.rstrip() for line in agent.process.stdout)
