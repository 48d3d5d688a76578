"""`headrace serve` as a real process, with the URL that it printed."""

import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from command import Command
from headrace.serving.loop_watch import STOOD_STILL

# Python runs it in each process before anything else: stages come no further.
_STAGES_WAIT = """
import signal, sys
while "headrace.pipeline.stage_process" in sys.orig_argv:
    signal.pause()
"""
# Those that are up.
_up: list["Server"] = []


@dataclass
class Server:
    """A server that is up. lines: what it has printed on standard output, log: on the other, which
    reader reads until its end; told: lines of it in which standstills were looked for."""

    command: Command
    url: str
    lines: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    reader: threading.Thread = field(init=False)
    told: int = field(default=0, init=False)


@contextmanager
def running_server(
    *arguments: str, ready: bool = True, prefix: Sequence[str] = (), **environment: str
) -> Iterator[Server]:
    """Start it on a free port; ready: wait until it answers requests. Otherwise it listens, and its
    stages, which are there, never load; prefix: a command that runs it.

    Nothing of it is left afterwards. AssertionError in the end if its event loop stood still.
    """
    environment = {"HEADRACE_WATCH_LOOP": "1", **environment}
    with ExitStack() as stack:
        if not ready:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            (Path(folder) / "sitecustomize.py").write_text(_STAGES_WAIT, encoding="ascii")
            environment["PYTHONPATH"] = folder
        arguments = ("serve", "--port", "0", *arguments)
        command = Command(list(arguments), environment=environment, prefix=list(prefix))
        stack.enter_context(command)
        server = Server(command, "")
        assert command.process.stdout is not None
        # Read all the while, or a full pipe would stop the server.
        server.reader = threading.Thread(
            target=lambda: server.log.extend(line.decode() for line in command.process.stderr or ())
        )
        server.reader.start()
        for line in command.process.stdout:
            server.lines.append(line.decode().rstrip())
            if " listens on " in server.lines[-1]:
                server.url = server.lines[-1].split(" listens on ")[1].split(",")[0]
                if not ready:
                    break
            if server.lines[-1].startswith("ready "):
                break
        else:
            server.reader.join()
            raise AssertionError(f"the server did not start: {''.join(server.log)}")
        _up.append(server)
        try:
            yield server
        finally:
            _up.remove(server)
            _end(command)
            server.reader.join()
    check_standstills(server)


def check_standstills(*servers: Server) -> None:
    """Raises AssertionError if the event loop of a server stood still; none: of any that is up."""
    for server in servers or _up:
        found = [line for line in server.log[server.told :] if STOOD_STILL in line]
        # Not the next test's fault.
        server.told = len(server.log)
        assert not found, "".join(found)


def _end(command: Command) -> None:
    """In order, so that its folder goes too; the second signal cuts what still runs."""
    for _ in range(2):
        command.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            command.process.wait(5)
            return
    command.process.kill()
