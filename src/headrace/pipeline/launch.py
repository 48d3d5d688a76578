"""Starts the ranks' processes, talks to them, and leaves none behind."""

import contextlib
import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import zmq

from headrace.errors import UsageError
from headrace.host.cpus import StageCpus
from headrace.host.engine_folder import EngineFolder
from headrace.host.memory import free_memory, memory_of
from headrace.pipeline.blame import failures_of, find_fault
from headrace.pipeline.epoch_start import EpochStart
from headrace.pipeline.forks import leave_in_forks
from headrace.pipeline.hosts import Hosts
from headrace.pipeline.process import LocalProcess, start_rank_process
from headrace.pipeline.rank_process import RankProcess, end_ranks, start_rank
from headrace.pipeline.remote_process import RemoteProcess
from headrace.pipeline.watch import ask
from headrace.protocol import codec
from headrace.protocol.fault import RankFault
from headrace.protocol.messages import (
    CacheConfig,
    Failure,
    FromRank,
    Loaded,
    Loading,
    NewEpoch,
    RankConfig,
    Report,
    Result,
    Stop,
    Timeline,
)
from headrace.protocol.plan import Plan
from headrace.signals import put_off

# Seconds: between two looks at whether ranks get on at start, for an ordered stop, and between two
# looks at who is dead where the system does not tell.
_START_LOOK = 1.0
_STOP_GRACE = 5.0
_DEATH_LOOK = 0.2


class RankProcesses:
    """The running ranks, as the engine's Pipeline. Always close() it.

    faults: of the ranks that cannot go on, once an error told that the pipeline broke.
    They belong to the process that started them. In one forked from it, check_owner() raises, and
    close() does nothing.
    """

    def __init__(
        self,
        configs: list[RankConfig],
        cpus: list[StageCpus],
        hosts: Hosts | None = None,
        nodes: Sequence[int] = (),
    ) -> None:
        """cpus: by rank. hosts: the others, if there are; closed with this. nodes: by rank, the
        host that it runs on, 0 for this one; none: all run here."""
        self._owner = os.getpid()
        self._hosts, self._nodes = hosts, nodes or [0] * len(configs)
        # The sockets in it have no other lock than that only this user may enter.
        self._folder = EngineFolder()
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        # A file object: once closed, its number cannot be mistaken for another file's.
        self._wake = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK), "r+")
        self._poller.register(self._wake.fileno(), zmq.POLLIN)
        self._woken = False
        self._processes: list[RankProcess] = []
        self._epoch, self._ranks = configs[0].epoch, configs[0].ranks
        self._cpus, self._moved = cpus, False
        self._start: EpochStart | None = EpochStart(configs, None, set())
        self._block_bytes: list[int] = []
        self.faults: list[RankFault] = []
        leave_in_forks(self)
        try:
            for config in configs:
                self._spawn(config)
        except BaseException:
            self.close(drain=False)
            raise

    def wait_loaded(
        self, on_progress: Callable[[Loading], None], check: Callable[[], None]
    ) -> list[Loaded]:
        """Until every stage holds its weights. check: called once a second or more often, may
        raise. Raises StartError or what a stage reports."""
        assert self._start is not None
        while (loaded := self._start.all_loaded) is None:
            check()
            self.look(_START_LOOK, on_progress)
        return loaded

    def reserve_cache(self, bytes_per_block: list[int], choose: Callable[[int], int]) -> int:
        """The number of blocks that choose gives, which other engines then know of.

        bytes_per_block: one number per rank. choose: given the bytes of memory that the engines of
        this user were promised and have not touched yet.
        """
        self._block_bytes = bytes_per_block
        with self._folder.promising() as promised:
            num_blocks = choose(promised)
            self._promise(num_blocks, self._processes)
        return num_blocks

    def allocate_cache(
        self,
        num_blocks: int,
        on_progress: Callable[[Loading], None],
        check: Callable[[], None],
    ) -> None:
        """Have every stage allocate its cache and meet the others."""
        self.decide_cache(num_blocks)
        while not self.look(_START_LOOK, on_progress):
            check()

    @property
    def loaded(self) -> list[Loaded] | None:
        """What the ranks of an epoch that begins said of their weights: all have, and it is to be
        decided how large the cache is. None at any other time."""
        start = self._start
        return None if start is None or start.num_blocks is not None else start.all_loaded

    def decide_cache(self, num_blocks: int) -> None:
        """The cache of the epoch that begins has so many blocks."""
        assert self._start is not None
        self._start.num_blocks = num_blocks
        # At once: nobody says anything before, and look() would wait for that.
        self._tell_cache(self._start)

    def room(self, node: int) -> int:
        """Bytes that this engine's ranks may have on a host: what is free there, and what they have
        now. Raises StartError if the host does not say."""
        if node:
            assert self._hosts is not None
            there = self._hosts.free_memory(node)
            return max(0, there.free + there.held - there.promised)
        here = [memory_of(rank.process.pid) or 0 for rank in self._processes if not rank.node]
        with self._folder.promising() as promised:
            return max(0, free_memory() + sum(here) - promised)

    def move(self, cpus: list[StageCpus], nodes: Sequence[int]) -> None:
        """Have the ranks run elsewhere, or with other layers, from the next restart() on; both by
        rank. None lives on then."""
        self._cpus, self._nodes, self._moved = cpus, nodes, True

    def restart(self, configs: list[RankConfig], num_blocks: int | None) -> None:
        """Begin the next epoch; look() furthers it. Ranks that have a fault, or died, are started
        anew; others keep their weights and their caches.

        configs: of all ranks for the new epoch. num_blocks: of the cache, as in the epoch before;
        None if it is to be decided once all have loaded.
        """
        self._epoch = configs[0].epoch
        unfit = {fault.rank for fault in self.faults} | {rank.number for rank in self._dead()}
        kept = set(range(len(self._processes))) - unfit
        if self._moved or any(config.store_fd is not None for config in configs):
            # Process groups do not outlive one of their members.
            unfit, kept = unfit | kept, set()
        self._moved = False
        self._start = EpochStart(configs, num_blocks, kept)
        self.faults = []
        self._replace(unfit)
        for number in kept:
            self._processes[number].send(NewEpoch(self._epoch))

    def look(
        self, timeout_s: float, on_progress: Callable[[Loading], None] = lambda _: None
    ) -> bool:
        """Further the start of an epoch, for timeout_s at most; whether every rank is ready.

        Returns early when something came, and after a wake(). Raises StallError for a rank that
        gives no sign of life, StartError for one that does not get on, and what a rank reports.
        """
        start = self._start
        if start is None:
            return True
        began = time.monotonic()
        messages = self._receive(timeout_s)
        waited_s = min(timeout_s, time.monotonic() - began)
        # A host that is away is waited for, however long.
        in_vain = not messages and not self._hosts_are_away
        start.waited(self._processes, waited_s, in_vain)
        start.take(messages, on_progress)
        if len(start.ready) == len(self._processes):
            for rank in self._processes:
                rank.was_ready = True
            self._start = None
            return True
        self._tell_cache(start)
        self._judge(start)
        return False

    def stand_still(self, ranks: tuple[int, ...]) -> None:
        """Count these among those that have to be started anew."""
        self.faults += [
            RankFault(number, None, outside=self._processes[number].stopped) for number in ranks
        ]

    def send(self, plan: Plan) -> None:
        """Give the plan to every rank, in order."""
        for rank, data in zip(self._processes, codec.encode_plan(plan, self._ranks), strict=True):
            rank.socket.send(data)

    def receive(self, timeout_s: float) -> list[Result | Report]:
        """Messages of this epoch that arrived, waiting up to timeout_s for the first or a wake().

        Raises PipelineError naming the stage if one failed or died.
        """
        return [
            message
            for message in self._receive(timeout_s)
            if isinstance(message, Result | Report) and message.epoch == self._epoch
        ]

    def timelines(self, last: int, timeout_s: float) -> list[Timeline]:
        """The newest activities of every rank that answers in time, on this process's clock.

        Not thread-safe, unlike wake(). Silent ranks are missing.
        """
        answers = ask([rank.watch for rank in self._processes], last, timeout_s)
        for answer in answers:
            self._processes[answer.rank].answered()
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
            rank.leave()
        self._folder.leave()

    def close(self, drain: bool) -> None:
        """End all stages. drain: let them finish the plans they hold; else at once.

        May be called again, also after an interrupted call.
        """
        if not self.owned:
            return
        try:
            if drain and self._start is None and not self._dead():
                deadline = time.monotonic() + _STOP_GRACE
                for rank in self._processes:
                    rank.send(Stop(self._epoch))
                for rank in self._processes:
                    rank.wait_dead(deadline - time.monotonic())
        finally:
            # A socket that is closed by half would be waited for without end.
            with put_off():
                end_ranks(self._processes)
                if self._hosts is not None:
                    self._hosts.close()
                self._wake.close()
                self._context.destroy(linger=0)
                self._folder.remove()
                self._processes.clear()

    def _spawn(self, config: RankConfig) -> None:
        """Start a rank, in the place of the one of its number, if there was one."""
        # Whatever interrupts, close() must know the process, and the context its sockets: it waits
        # for them.
        with put_off():
            process = self._start_process(config)
            rank = start_rank(config, process, self._nodes[config.rank], self._context)
            self._processes[config.rank : config.rank + 1] = [rank]
            self._poller.register(rank.socket, zmq.POLLIN)
            if rank.death is not None:
                self._poller.register(rank.death.fileno(), zmq.POLLIN)

    def _start_process(self, config: RankConfig) -> LocalProcess | RemoteProcess:
        folder, node, cpus = self._folder.path, self._nodes[config.rank], self._cpus[config.rank]
        if node:
            assert self._hosts is not None
            return self._hosts.start_rank(node, config.rank, cpus, folder)
        environment = dict(os.environ)
        if config.link_backend == "gloo":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        inherited = [] if config.store_fd is None else [config.store_fd]
        return start_rank_process(config.rank, cpus, folder, environment, inherited)

    def _replace(self, numbers: Iterable[int]) -> None:
        """End these ranks, and start others in their places."""
        assert self._start is not None
        old = [self._processes[number] for number in sorted(numbers)]
        with put_off():
            for rank in old:
                # Unless starting another one failed before.
                if rank.socket in self._poller:
                    self._poller.unregister(rank.socket)
                if rank.death is not None and not rank.death.closed:
                    self._poller.unregister(rank.death.fileno())
                rank.socket.close()
                rank.watch.close()
            # All first: their memory is needed, and their neighbours learn of it.
            end_ranks(old)
        for rank in old:
            self._spawn(self._start.configs[rank.number])

    def _promise(self, num_blocks: int, ranks: Iterable[RankProcess]) -> None:
        """Let other engines know what these will take for their caches."""
        sizes = {rank: self._block_bytes[rank.number] * num_blocks for rank in ranks}
        self._folder.promise({rank.process.pid: sizes[rank] for rank in sizes if not rank.node})
        if self._hosts is not None:
            there = {rank.number: size for rank, size in sizes.items() if rank.node}
            self._hosts.promise_memory(there)

    def _tell_cache(self, start: EpochStart) -> None:
        """Once all have loaded, and it is decided how large the cache is."""
        all_loaded = start.all_loaded
        if start.cache_told or start.num_blocks is None or all_loaded is None:
            return
        start.cache_told = True
        listening = [edge for loaded in all_loaded for edge in loaded.listening]
        for rank in self._processes:
            peers = [edge for edge in listening if edge.source == rank.number]
            rank.send(CacheConfig(start.num_blocks, peers))
        new = [rank for rank in self._processes if rank.number not in start.kept]
        self._promise(start.num_blocks, new)

    @property
    def _hosts_are_away(self) -> bool:
        hosts, nodes = self._hosts, {rank.node for rank in self._processes if rank.node}
        return hosts is not None and not all(hosts.is_there(node) for node in nodes)

    def _judge(self, start: EpochStart) -> None:
        """Replace ranks that live on but do not note the new epoch. Raises StallError or StartError
        if somebody does not get on."""
        self._replace(start.deaf(self._processes))
        if (stuck := start.stuck(self._processes)) is not None:
            error, ranks = stuck
            self.stand_still(tuple(rank.number for rank in ranks))
            raise error

    def _receive(self, timeout_s: float) -> list[FromRank]:
        """All messages at hand; raises what is to be told if a rank failed or died."""
        deadline = time.monotonic() + timeout_s
        while True:
            wait_s = max(0.0, deadline - time.monotonic())
            if any(rank.death is None for rank in self._processes):
                wait_s = min(wait_s, _DEATH_LOOK)
            messages = self._read(wait_s)
            failures = self._failures(messages)
            if failures or self._dead():
                error, self.faults = find_fault(
                    self._processes, failures, lambda: self._failures(self._read(0.0)), self._ranks
                )
                raise error
            if messages or self._woken or time.monotonic() >= deadline:
                self._woken = False
                return messages

    def _read(self, wait_s: float) -> list[FromRank]:
        # The next whole millisecond, or the last one would be waited for busily.
        ready = self._poller.poll(math.ceil(wait_s * 1000))
        messages: list[FromRank] = []
        for endpoint, _ in ready:
            if endpoint == self._wake.fileno():
                self._wake.read(8)
                self._woken = True
            for rank in self._processes:
                if rank.socket is endpoint:
                    messages += rank.read()
        return messages

    def _failures(self, messages: Iterable[FromRank]) -> list[Failure]:
        return failures_of(messages, self._epoch)

    def _dead(self) -> list[RankProcess]:
        return [rank for rank in self._processes if rank.dead]
