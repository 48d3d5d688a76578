"""Starts the ranks' processes, talks to them, and leaves none behind."""

import contextlib
import errno
import io
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from headrace import errors
from headrace.errors import HeadraceError, PipelineError, StartError, UsageError
from headrace.host.cpus import StageCpus
from headrace.host.engine_folder import EngineFolder
from headrace.host.pinning import start_process
from headrace.pipeline.watch import ask, connect_watch
from headrace.protocol import codec
from headrace.protocol.messages import (
    CacheConfig,
    EdgeAddress,
    Failure,
    FromRank,
    Loaded,
    Loading,
    RankConfig,
    Ready,
    Report,
    Result,
    Stop,
    Timeline,
    ToRank,
)
from headrace.protocol.plan import Plan

_STAGE_MODULE = "headrace.pipeline.stage_process"
# Seconds: for a stage to show any progress at start, between two looks at that, for the other
# stages' messages once one has failed, for an ordered stop.
_START_DEADLINE = 120.0
_START_LOOK = 1.0
_LAST_WORDS = 1.0
_STOP_GRACE = 5.0


@dataclass
class _Rank:
    number: int
    name: str
    process: subprocess.Popen[bytes]
    socket: zmq.Socket[bytes]
    # The second socket, to ask what the stage does.
    watch: zmq.Socket[bytes]
    log: Path
    layers: str
    # The last sign of life, on time.monotonic's clock.
    heard_at: float


class RankProcesses:
    """The running ranks, as the engine's Pipeline. Always close() it.

    They belong to the process that started them. In one forked from it, check_owner() raises, and
    close() does nothing.
    """

    def __init__(self, configs: list[RankConfig], cpus: list[StageCpus]) -> None:
        self._owner = os.getpid()
        # The sockets in it have no other lock than that only this user may enter.
        self._folder = EngineFolder()
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        # A file object: once closed, its number cannot be mistaken for another file's.
        self._wake = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK), "r+")
        self._poller.register(self._wake.fileno(), zmq.POLLIN)
        self._woken = False
        self._processes: list[_Rank] = []
        # Where ranks wait for those that send to them.
        self._listening: list[EdgeAddress] = []
        self._epoch, self._ranks = configs[0].epoch, configs[0].ranks
        _started.add(self)
        try:
            for config in configs:
                self._spawn(config, cpus[config.rank])
        except BaseException:
            self.close(drain=False)
            raise

    def wait_loaded(
        self, on_progress: Callable[[Loading], None], check: Callable[[], None]
    ) -> list[Loaded]:
        """Until every stage holds its weights. check: called once a second or more often, may
        raise. Raises StartError or what a stage reports."""
        loaded = self._wait_for(Loaded, on_progress, check)
        self._listening = [address for rank in loaded for address in rank.listening]
        return loaded

    def reserve_cache(self, bytes_per_block: list[int], choose: Callable[[int], int]) -> int:
        """The number of blocks that choose gives, which other engines then know of.

        bytes_per_block: one number per rank. choose: given the bytes of memory that the engines of
        this user were promised and have not touched yet.
        """
        with self._folder.promising() as promised:
            num_blocks = choose(promised)
            self._folder.promise(
                {
                    rank.process.pid: size * num_blocks
                    for rank, size in zip(self._processes, bytes_per_block, strict=True)
                }
            )
        return num_blocks

    def allocate_cache(
        self,
        num_blocks: int,
        on_progress: Callable[[Loading], None],
        check: Callable[[], None],
    ) -> None:
        """Have every stage allocate its cache and meet the others."""
        for rank in self._processes:
            peers = [edge for edge in self._listening if edge.source == rank.number]
            rank.socket.send(codec.encode(CacheConfig(num_blocks, peers)))
        self._wait_for(Ready, on_progress, check)

    def send(self, plan: Plan) -> None:
        """Give the plan to every rank, in order."""
        for rank, data in zip(self._processes, codec.encode_plan(plan, self._ranks), strict=True):
            rank.socket.send(data)

    def receive(self, timeout_s: float) -> list[Result | Report]:
        """Messages of this epoch that arrived, waiting up to timeout_s for the first or a wake().

        Raises PipelineError naming the stage if one failed or died.
        """
        messages: list[Result | Report] = []
        for message in self._receive(timeout_s):
            if not isinstance(message, Result | Report):
                raise PipelineError(f"unexpected {type(message).__name__} from a stage")
            if message.epoch == self._epoch:
                messages.append(message)
        return messages

    def timelines(self, last: int, timeout_s: float) -> list[Timeline]:
        """The newest activities of every rank that answers in time, on this process's clock.

        Not thread-safe, unlike wake(). Silent ranks are missing.
        """
        answers = ask([rank.watch for rank in self._processes], last, timeout_s)
        now = time.monotonic()
        for answer in answers:
            self._processes[answer.rank].heard_at = now
        return answers

    def signs_of_life(self) -> list[float]:
        """When each rank last sent anything, by number, in seconds of time.monotonic."""
        return [rank.heard_at for rank in self._processes]

    def wake(self) -> None:
        """Make a receive() that waits in another thread return; the next one, if none does."""
        with contextlib.suppress(ValueError):
            self._wake.write((1).to_bytes(8, sys.byteorder))

    @property
    def owned(self) -> bool:
        """Whether this is the process that started them, not a fork of it."""
        return os.getpid() == self._owner

    def check_owner(self) -> None:
        """Raises UsageError in a fork of the process that started them."""
        if not self.owned:
            raise UsageError(
                f"this engine belongs to process {self._owner}, from which this one was forked: "
                "make another here, or start processes by spawn and load in each"
            )

    def leave(self) -> None:
        """In a fork of the process that started them: hold nothing by which they, or others, tell
        that this process lives."""
        self._wake.close()
        for rank in self._processes:
            if rank.process.stdin is not None:
                rank.process.stdin.close()
        self._folder.leave()

    def close(self, drain: bool) -> None:
        """End all stages. drain: let them finish the plans they hold; else at once.

        May be called again, also after an interrupted call.
        """
        if not self.owned:
            return
        try:
            if drain and not self._dead():
                self._send_all(Stop(self._epoch))
                deadline = time.monotonic() + _STOP_GRACE
                for rank in self._processes:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        rank.process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for rank in self._processes:
                rank.process.kill()
            for rank in self._processes:
                rank.process.wait()
                if rank.process.stdin is not None:
                    rank.process.stdin.close()
            self._wake.close()
            self._context.destroy(linger=0)
            self._folder.remove()
            self._processes.clear()

    def _spawn(self, config: RankConfig, cpus: StageCpus) -> None:
        address = f"ipc://{self._folder.path}/rank-{config.rank}"
        watch_address = f"ipc://{self._folder.path}/watch-{config.rank}"
        # The stage binds and this side connects, since a socket that is bound but has no peer yet
        # blocks its sender, while one that connects queues.
        endpoint = self._context.socket(zmq.DEALER)
        endpoint.set_hwm(0)
        # Whatever ends this process, nothing waits for messages to be delivered.
        endpoint.setsockopt(zmq.LINGER, 0)
        endpoint.setsockopt(zmq.RECONNECT_IVL, 10)
        try:
            endpoint.connect(address)
            watch = connect_watch(self._context, watch_address)
        except zmq.ZMQError as error:
            raise StartError(
                f"cannot create sockets in {self._folder.path} ({error}): set TMPDIR to a short "
                "path on a local disk"
            ) from error
        self._poller.register(endpoint, zmq.POLLIN)
        log = self._folder.path / f"rank-{config.rank}.log"
        environment = dict(os.environ)
        if config.link_backend == "gloo":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        inherited = [] if config.store_fd is None else [config.store_fd]
        with log.open("wb") as output:
            process = start_process(
                [
                    *(sys.executable, "-P", "-m", _STAGE_MODULE),
                    *(str(self._owner), address, watch_address),
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
        # At once: whatever interrupts from here on, close() knows the process.
        layers = f"layers {config.share.first_layer} to {config.share.end_layer - 1}"
        rank = _Rank(
            number=config.rank,
            name=config.ranks.name(config.rank),
            process=process,
            socket=endpoint,
            watch=watch,
            log=log,
            layers=layers,
            heard_at=time.monotonic(),
        )
        self._processes.append(rank)
        endpoint.send(codec.encode(config))

    def _send_all(self, message: ToRank) -> None:
        data = codec.encode(message)
        for rank in self._processes:
            rank.socket.send(data)

    def _receive(self, timeout_s: float) -> list[FromRank]:
        """All messages at hand; raises what is to be told if a stage failed or died."""
        deadline = time.monotonic() + timeout_s
        while True:
            # Deaths are noticed between polls: a dead process says nothing on its socket.
            wait_s = max(0.0, min(0.2, deadline - time.monotonic()))
            dead = self._dead()
            messages = self._read(wait_s)
            if dead or any(isinstance(message, Failure) for message in messages):
                raise self._fault([m for m in messages if isinstance(m, Failure)])
            if messages or self._woken or time.monotonic() >= deadline:
                self._woken = False
                return messages

    def _read(self, wait_s: float) -> list[FromRank]:
        messages: list[FromRank] = []
        for endpoint, _ in self._poller.poll(int(wait_s * 1000)):
            if endpoint == self._wake.fileno():
                self._wake.read(8)
                self._woken = True
                continue
            rank = next(rank for rank in self._processes if rank.socket is endpoint)
            rank.heard_at = time.monotonic()
            while endpoint.poll(0):
                try:
                    messages.append(codec.decode_from_rank(endpoint.recv()))
                except msgspec.DecodeError as error:
                    raise PipelineError(f"a stage sent a message that is none: {error}") from error
        return messages

    def _dead(self) -> list[_Rank]:
        return [rank for rank in self._processes if rank.process.poll() is not None]

    def _fault(self, failures: list[Failure]) -> HeadraceError:
        """The error to raise, once there was time for everybody's last word.

        A dead or stuck stage makes its neighbours fail too, so blame goes in this order: a stage
        that reports a fault of its own; one that died without a word; the stage whose links were
        lost and that itself still lives; a stage that lost a link.
        """
        deadline = time.monotonic() + _LAST_WORDS
        while time.monotonic() < deadline:
            if any(failure.lost_peer is None for failure in failures):
                break
            failures += [m for m in self._read(0.05) if isinstance(m, Failure)]
        own = [failure for failure in failures if failure.lost_peer is None]
        if own:
            return self._error_of(own[0])
        speakers = {failure.rank for failure in failures}
        for rank in self._dead():
            if rank.number not in speakers:
                name = f"{rank.name} ({rank.layers})"
                ending = _how_it_ended(rank.process.returncode)
                return PipelineError(f"{name} {ending}{_last_line(rank)}")
        silent = [failure for failure in failures if failure.lost_peer not in speakers]
        return self._error_of((silent or failures)[0])

    def _error_of(self, failure: Failure) -> HeadraceError:
        kind = getattr(errors, failure.kind, PipelineError)
        error: HeadraceError = kind(f"{self._ranks.name(failure.rank)}: {failure.message}")
        error.add_note(failure.details)
        return error

    def _wait_for(
        self,
        kind: type[Loaded] | type[Ready],
        on_progress: Callable[[Loading], None],
        check: Callable[[], None],
    ) -> list[Loaded]:
        """One message of this kind from every rank, in rank order."""
        got: dict[int, FromRank] = {}
        # Seconds waited for nothing. What a wait took longer, nobody ran.
        quiet_s = 0.0
        while len(got) < len(self._processes):
            check()
            began = time.monotonic()
            messages = self._receive(_START_LOOK)
            quiet_s = 0.0 if messages else quiet_s + min(_START_LOOK, time.monotonic() - began)
            for message in messages:
                if isinstance(message, Loading):
                    on_progress(message)
                elif isinstance(message, kind):
                    got[message.rank] = message
                else:
                    raise StartError(f"unexpected {type(message).__name__} while starting")
            if quiet_s > _START_DEADLINE:
                missing = [rank.name for rank in self._processes if rank.number not in got]
                raise StartError(
                    f"{' and '.join(missing)} showed no progress for {_START_DEADLINE:g} s while "
                    "starting"
                )
        return [m for _, m in sorted(got.items()) if isinstance(m, Loaded)]


_started: "weakref.WeakSet[RankProcesses]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for processes in list(_started):
        processes.leave()


os.register_at_fork(after_in_child=_leave_to_parent)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by signal {-code} ({signal.strsignal(-code)})"


def _last_line(rank: _Rank) -> str:
    """What the process wrote last, such as the loader's word on a missing library."""
    lines = rank.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""


def bind_master(address: str, port: int) -> socket.socket:
    """The rendezvous store's listening socket; port 0 picks a free one.

    Raises StartError naming address and port if it cannot be had.
    """
    master = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Connections of an earlier run that are still winding down do not count as a port in use.
    master.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        master.bind((address, port))
        master.listen()
    except OSError as error:
        master.close()
        advice = (
            "choose another --master-port or 0 for a free one"
            if error.errno in (errno.EADDRINUSE, errno.EACCES)
            else "--master-addr must be an IPv4 address of this machine"
        )
        raise StartError(
            f"cannot listen on {address}:{port} for the stages to meet "
            f"({error.strerror or error}): {advice}"
        ) from error
    return master
