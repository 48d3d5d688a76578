"""One rank's process as the engine's side has it: its sockets, its log, how it ends."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from headrace.errors import PipelineError, StartError
from headrace.host.cpus import StageCpus
from headrace.host.pinning import start_process
from headrace.pipeline.watch import connect_watch
from headrace.protocol import codec
from headrace.protocol.messages import FromRank, RankConfig, ToRank

_STAGE_MODULE = "headrace.pipeline.stage_process"
# Ends that a process does not come to by itself.
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


@dataclass(eq=False)
class RankProcess:
    """A rank that was started, and may have died meanwhile.

    socket: its ordered one for control; watch: to ask what it does. death: readable once the
    process has died (Linux: pidfd_open(2)); None where the system has no such thing. heard_at: its
    last sign of life, on time.monotonic.
    """

    number: int
    name: str
    layers: str
    process: subprocess.Popen[bytes]
    socket: "zmq.Socket[bytes]"
    watch: "zmq.Socket[bytes]"
    death: io.FileIO | None
    log: Path
    heard_at: float

    def send(self, message: ToRank) -> None:
        """Queue a message to the rank."""
        self.socket.send(codec.encode(message))

    def read(self) -> list[FromRank]:
        """What it has sent by now. Raises PipelineError for what is no message."""
        messages: list[FromRank] = []
        while self.socket.poll(0):
            try:
                messages.append(codec.decode_from_rank(self.socket.recv()))
            except msgspec.DecodeError as error:
                raise PipelineError(f"{self.name} sent a message that is none: {error}") from error
        if messages:
            self.heard_at = time.monotonic()
        return messages

    @property
    def dead(self) -> bool:
        """Whether its process has ended."""
        return self.process.poll() is not None

    @property
    def ended_from_outside(self) -> bool:
        """Whether its process, which has ended, was ended by somebody else."""
        return -self.process.returncode in _FROM_OUTSIDE

    @property
    def stopped(self) -> bool:
        """Whether its process was stopped by a signal (Linux: Documentation/filesystems/proc.rst,
        the state in stat)."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError):
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    def how_it_ended(self) -> str:
        """In words; with what the process wrote last, such as the loader's word on a library."""
        code = self.process.returncode
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"{self.name} ({self.layers}) {how}{f': {lines[-1]}' if lines else ''}"

    def leave(self) -> None:
        """In a fork of the process that started it: hold nothing by which it tells that this
        process lives."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.death is not None:
            self.death.close()


def start_rank(
    config: RankConfig, cpus: StageCpus, folder: Path, context: "zmq.Context[zmq.Socket[bytes]]"
) -> RankProcess:
    """Start the process of a rank, and tell it what it is. folder: for its sockets and its log.

    Raises StartError if there cannot be sockets.
    """
    names = [folder / f"{kind}-{config.rank}" for kind in ("rank", "watch")]
    for path in names:
        # Of the process that had this number before: nobody must take it for the new one's.
        path.unlink(missing_ok=True)
    address, watch_address = (f"ipc://{path}" for path in names)
    # The stage binds and this side connects, since a socket that is bound but has no peer yet
    # blocks its sender, while one that connects queues.
    endpoint = context.socket(zmq.DEALER)
    endpoint.set_hwm(0)
    # Whatever ends this process, nothing waits for messages to be delivered.
    endpoint.setsockopt(zmq.LINGER, 0)
    endpoint.setsockopt(zmq.RECONNECT_IVL, 10)
    try:
        endpoint.connect(address)
        watch = connect_watch(context, watch_address)
    except zmq.ZMQError as error:
        raise StartError(
            f"cannot create sockets in {folder} ({error}): set TMPDIR to a short path on a local "
            "disk"
        ) from error
    log = folder / f"rank-{config.rank}.log"
    environment = dict(os.environ)
    if config.link_backend == "gloo":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    inherited = [] if config.store_fd is None else [config.store_fd]
    with log.open("wb") as output:
        process = start_process(
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
    rank = RankProcess(
        number=config.rank,
        name=config.ranks.name(config.rank),
        layers=f"layers {config.share.first_layer} to {config.share.end_layer - 1}",
        process=process,
        socket=endpoint,
        watch=watch,
        death=_death_of(process.pid),
        log=log,
        heard_at=time.monotonic(),
    )
    rank.send(config)
    return rank


def _death_of(process: int) -> io.FileIO | None:
    # A file object: once closed, its number cannot be mistaken for another file's.
    try:
        return io.FileIO(os.pidfd_open(process), "r")
    except OSError:
        return None


def end_ranks(ranks: Iterable[RankProcess]) -> None:
    """Kill these processes, and wait until they are gone."""
    ranks = list(ranks)
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.wait()
        rank.leave()
