"""A rank's process on this host: started with its sockets in a folder, and its log beside them."""

import io
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from headrace.errors import StartError
from headrace.host.cpus import StageCpus
from headrace.host.pinning import start_process
from headrace.signals import put_off

_STAGE_MODULE = "headrace.pipeline.stage_process"


@dataclass(frozen=True, eq=False)
class LocalProcess:
    """address, watch_address: of its two sockets. death: readable once it has ended (Linux:
    pidfd_open(2)); None where the system has no such thing.

    Popen looks for the end under a lock of its own, which a signal that raises there would leave
    locked: it is put off.
    """

    popen: subprocess.Popen[bytes]
    address: str
    watch_address: str
    death: io.FileIO | None
    log: Path

    @property
    def pid(self) -> int:
        """Its number."""
        return self.popen.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, as far as anybody has looked."""
        return self.popen.returncode

    @property
    def last_line(self) -> str:
        """What it wrote last, such as the loader's word on a missing library."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        if self.returncode is None and (self.death is None or is_readable(self.death, 0.0)):
            with put_off():
                self.popen.poll()
        return self.returncode

    def wait(self) -> int:
        """Its exit code, once it has ended. For one that was killed: signals are put off."""
        with put_off():
            return self.popen.wait()

    def kill(self) -> None:
        """End it at once."""
        with put_off():
            self.popen.kill()

    def leave(self) -> None:
        """Hold nothing by which it tells that this process lives."""
        if self.popen.stdin is not None:
            self.popen.stdin.close()
        if self.death is not None:
            self.death.close()


def start_rank_process(
    rank: int,
    cpus: StageCpus,
    folder: Path,
    environment: Mapping[str, str],
    inherited: Sequence[int] = (),
) -> LocalProcess:
    """Start the process of a rank. inherited: descriptors that it gets.

    Raises StartError if there cannot be sockets.
    """
    address, watch_address = f"ipc://{folder}/rank-{rank}", f"ipc://{folder}/watch-{rank}"
    for path in (address, watch_address):
        # Of the process that had this number before: nobody must take it for the new one's.
        Path(path.removeprefix("ipc://")).unlink(missing_ok=True)
    if len(watch_address.removeprefix("ipc://")) > zmq.IPC_PATH_MAX_LEN:
        raise StartError(
            f"cannot create sockets in {folder} (its name is too long): set TMPDIR to a short "
            "path on a local disk"
        )
    log = folder / f"rank-{rank}.log"
    with log.open("wb") as output:
        popen = start_process(
            [
                *(sys.executable, "-P", "-m", _STAGE_MODULE),
                *(str(os.getpid()), address, watch_address),
            ],
            cpus,
            environment,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=inherited,
            # A Ctrl-C in the terminal is for the engine, which then ends the stages.
            start_new_session=True,
        )
    return LocalProcess(popen, address, watch_address, _death_of(popen.pid), log)


def is_readable(file: io.FileIO, timeout_s: float) -> bool:
    """Whether it is, or becomes so within that time."""
    readable = select.poll()
    readable.register(file, select.POLLIN)
    return bool(readable.poll(timeout_s * 1000))


def _death_of(process: int) -> io.FileIO | None:
    # A file object: once closed, its number cannot be mistaken for another file's.
    try:
        return io.FileIO(os.pidfd_open(process), "r")
    except OSError:
        return None
