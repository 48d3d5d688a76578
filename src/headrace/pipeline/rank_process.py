"""One rank's process as the engine's side has it: its sockets, its log, how it ends."""

import contextlib
import io
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from headrace.errors import PipelineError
from headrace.pipeline.process import LocalProcess, is_readable
from headrace.pipeline.remote_process import RemoteProcess
from headrace.pipeline.watch import connect_watch
from headrace.protocol import codec
from headrace.protocol.messages import FromRank, RankConfig, ShowTimeline, ToRank

# Seconds between two looks at a process whose end the system does not tell.
_LOOK_S = 0.01
# Ends that a process does not come to by itself.
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


@dataclass(eq=False)
class RankProcess:
    """A rank that was started, and may have died meanwhile.

    node: its host, 0 for the engine's. socket: its ordered one for control; watch: to ask what it
    does. heard_at: its last sign of life, on time.monotonic. has_answered: whether it ever has;
    before, others may speak for it. was_ready: whether it has been, in some epoch.
    """

    number: int
    name: str
    layers: str
    node: int
    process: LocalProcess | RemoteProcess
    socket: "zmq.Socket[bytes]"
    watch: "zmq.Socket[bytes]"
    heard_at: float
    has_answered: bool = False
    was_ready: bool = False

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

    def answered(self) -> None:
        """It has, just now, what it was asked on its watch socket."""
        self.heard_at, self.has_answered = time.monotonic(), True

    def ask_for_answer(self) -> None:
        """Have it answer, whatever it does."""
        self.watch.send(codec.encode(ShowTimeline(last=0)))

    def take_answers(self) -> bool:
        """Whether it has answered, if it was asked."""
        answered = False
        with contextlib.suppress(zmq.ZMQError):
            # Until none is there, or the next is one to the question before the last.
            while self.watch.poll(0):
                self.watch.recv(zmq.NOBLOCK)
                self.answered()
                answered = True
        return answered

    @property
    def dead(self) -> bool:
        """Whether its process has ended."""
        return self.process.poll() is not None

    def wait_dead(self, timeout_s: float) -> bool:
        """Whether its process has ended, or does so within that time."""
        deadline = time.monotonic() + timeout_s
        while not self.dead and (left_s := deadline - time.monotonic()) > 0:
            if self.death is None:
                time.sleep(_LOOK_S)
            else:
                is_readable(self.death, left_s)
        return self.dead

    @property
    def death(self) -> io.FileIO | None:
        """Readable once its process has ended; None where the system has no such thing."""
        return self.process.death

    @property
    def ended_from_outside(self) -> bool:
        """Whether its process, which has ended, was ended by somebody else."""
        code = self.process.returncode
        return code is not None and -code in _FROM_OUTSIDE

    @property
    def stopped(self) -> bool:
        """Whether its process was stopped by a signal (Linux: Documentation/filesystems/proc.rst,
        the state in stat). Of another host's nobody knows."""
        if self.node:
            return False
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError):
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    def how_it_ended(self) -> str:
        """In words; with what the process wrote last, such as the loader's word on a library."""
        code, said = self.process.returncode, self.process.last_line
        assert code is not None
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"{self.name} ({self.layers}) {how}{f': {said}' if said else ''}"

    def leave(self) -> None:
        """In a fork of the process that started it: hold nothing by which it tells that this
        process lives."""
        self.process.leave()


def start_rank(
    config: RankConfig,
    process: LocalProcess | RemoteProcess,
    node: int,
    context: "zmq.Context[zmq.Socket[bytes]]",
) -> RankProcess:
    """A rank whose process was started, on the host of this number: tell it what it is."""
    # The stage binds and this side connects, since a socket that is bound but has no peer yet
    # blocks its sender, while one that connects queues.
    endpoint = context.socket(zmq.DEALER)
    endpoint.set_hwm(0)
    # Whatever ends this process, nothing waits for messages to be delivered.
    endpoint.setsockopt(zmq.LINGER, 0)
    endpoint.setsockopt(zmq.RECONNECT_IVL, 10)
    endpoint.connect(process.address)
    rank = RankProcess(
        number=config.rank,
        name=config.ranks.name(config.rank),
        layers=f"layers {config.share.first_layer} to {config.share.end_layer - 1}",
        node=node,
        process=process,
        socket=endpoint,
        watch=connect_watch(context, process.watch_address),
        heard_at=time.monotonic(),
    )
    rank.send(config)
    return rank


def end_ranks(ranks: Iterable[RankProcess]) -> None:
    """Kill these processes, and wait until they are gone."""
    ranks = list(ranks)
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.wait()
        rank.leave()
