"""Inside a stage's process: sets the stage up, then drives its loop with real links."""

import gc
import os
import time
import traceback
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
import zmq

from headrace.errors import HeadraceError, PipelineError
from headrace.execution.executor import Executor
from headrace.execution.load import load_model, stage_executor
from headrace.execution.model_executor import cache_bytes_per_block
from headrace.kernels.path import choose_path, path_name
from headrace.pipeline.carry_out import carry_out
from headrace.pipeline.effects import Effect
from headrace.pipeline.group_link import Rendezvous
from headrace.pipeline.host_edges import HostEdges
from headrace.pipeline.ledger import Channel, Ledger
from headrace.pipeline.links import Link, LinkError
from headrace.pipeline.rendezvous import Meeting
from headrace.pipeline.shard_meeting import ShardMeeting
from headrace.pipeline.stage_loop import StageRole, stage_loop
from headrace.pipeline.timeline import RankTimeline
from headrace.pipeline.watch import Watch, answer_when_asked
from headrace.protocol import codec
from headrace.protocol.messages import (
    CacheConfig,
    Failure,
    FromRank,
    Loaded,
    Loading,
    NewEpoch,
    RankConfig,
    Ready,
    Stop,
    ToRank,
)
from headrace.protocol.plan import Plan

# Seconds for which a rank that has cores of its own looks for another shard's sum before it sleeps:
# waking up takes as long as a small sum or two.
_SPIN_S = 200e-6


class EpochOver(Exception):
    """The engine has begun another epoch, in the middle of this one."""

    def __init__(self, epoch: int) -> None:
        super().__init__(epoch)
        self.epoch = epoch


class ControlSocket:
    """The stage's end of its ordered socket to the engine."""

    def __init__(self, address: str, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.bind(address)

    def send(self, message: FromRank) -> None:
        """Queue a message to the engine."""
        self._socket.send(codec.encode(message))

    def receive(self) -> ToRank:
        """The next message; blocks."""
        return codec.decode_to_rank(self._socket.recv())

    def take_plans(self, wait: bool) -> list[Plan | Stop]:
        """All plans that have arrived; wait: block until there is one. Raises EpochOver when the
        engine begins another epoch."""
        messages: list[Plan | Stop] = []
        if wait:
            self._socket.poll()
        while True:
            try:
                message = codec.decode_to_rank(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return messages
            if isinstance(message, NewEpoch):
                raise EpochOver(message.epoch)
            if not isinstance(message, Plan | Stop):
                raise PipelineError(f"unexpected {type(message).__name__} among the plans")
            messages.append(message)

    def check_epoch(self) -> None:
        """To be called now and then in waits in which the engine has nothing else to say. Raises
        EpochOver when it begins another epoch."""
        if self._socket.poll(0):
            message = self.receive()
            if isinstance(message, NewEpoch):
                raise EpochOver(message.epoch)
            raise PipelineError(f"unexpected {type(message).__name__} before the links are there")

    def next_epoch(self) -> int | None:
        """Wait for the engine to begin another epoch, whatever it sends until then; None if it
        orders the end."""
        while True:
            match self.receive():
                case NewEpoch(epoch):
                    return epoch
                case Stop():
                    return None

    def cache_config(self) -> CacheConfig:
        """The cache's size, which comes next in this epoch. Raises EpochOver if none comes."""
        message = self.receive()
        if isinstance(message, NewEpoch):
            raise EpochOver(message.epoch)
        if not isinstance(message, CacheConfig):
            raise PipelineError(f"expected the cache's size, got {type(message).__name__}")
        return message

    def close(self) -> None:
        """Close; what is queued is delivered for up to two seconds, until the context ends."""
        self._socket.close()


def drive(
    loop: Generator[Effect, Any, None],
    control: ControlSocket,
    links: Mapping[Channel, Link],
    timeline: RankTimeline,
    link_timeout: float,
) -> None:
    """Carry out a stage loop's effects until it ends: time passes by itself."""
    effects = carry_out(
        loop,
        control,
        links,
        Ledger(),
        timeline,
        link_timeout=link_timeout,
        clock=time.monotonic,
    )
    for _ in effects:
        pass


def run_stage(
    config: RankConfig, control: ControlSocket, watch: Watch, folder: Path, cpus: set[int]
) -> None:
    """Load, then run one epoch after the other on these cores, until the engine orders the end.
    folder: the engine's."""
    device = torch.device("cpu")
    cpus_at_start = os.sched_getaffinity(0)
    note = choose_path()
    model = load_model(
        config, device, lambda done: control.send(Loading(config.rank, "weights loaded", done))
    )
    # A synthetic stage keeps nothing in its cache.
    weights, block = 0, 1
    if model is not None:
        weights = model.weights.nbytes
        block = cache_bytes_per_block(config.program, config.block_size, model.dtype)
    how = config.host_links
    executor: Executor | None = None
    epoch: int | None = config.epoch
    while epoch is not None:
        # The threads of links, which are to come, go where they find room.
        os.sched_setaffinity(0, cpus_at_start)
        watch.timeline = RankTimeline(epoch, config.rank)
        meeting = Meeting(
            config.rank,
            config.ranks,
            config.link_backend,
            folder,
            config.link_emulation,
            None if how is None else HostEdges(how, epoch),
        )
        shards = ShardMeeting(config.rank, config.ranks, folder, epoch, how)
        try:
            listening = meeting.listening + shards.listening
            control.send(Loaded(epoch, config.rank, weights, block, path_name(), note, listening))
            cache = control.cache_config()
            if executor is None:
                executor = stage_executor(config, model, cache.num_blocks, device)
            else:
                executor.forget()
            store = Rendezvous(config.master_addr, config.master_port, config.store_fd)
            links = meeting.connect(
                cache.peers, store, device, config.start_timeout, control.check_epoch
            )
            if model is not None and model.exchange is not None:
                shards.join(
                    model.exchange,
                    cache.peers,
                    config.start_timeout,
                    control.check_epoch,
                    spin_s=_SPIN_S if cpus < cpus_at_start else 0.0,
                    wait_s=config.link_timeout,
                )
            control.send(Ready(epoch, config.rank))
            _run_epoch(config, epoch, executor, control, links, watch.timeline, cpus)
            meeting.close()
            shards.leave()
            return
        except EpochOver as over:
            meeting.give_up()
            shards.give_up()
            epoch = over.epoch
        except LinkError as error:
            control.send(_failure(config, epoch, watch.timeline, error))
            # Neighbours that wait for this rank learn of it.
            meeting.give_up()
            shards.give_up()
            epoch = control.next_epoch()


def _run_epoch(
    config: RankConfig,
    epoch: int,
    executor: Executor,
    control: ControlSocket,
    links: dict[Channel, Link],
    timeline: RankTimeline,
    cpus: set[int],
) -> None:
    """Run the loop of one epoch to its end."""
    role = StageRole(
        rank=config.rank,
        ranks=config.ranks,
        epoch=epoch,
        window=config.window,
        max_rows=config.max_num_seqs,
        blocking_feedback=config.blocking_feedback,
    )
    # What is there now stays: no need for the collector to walk through it again and again. What
    # was there in the epoch before may be garbage: a link holds its error, whose frames hold it.
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    os.sched_setaffinity(0, cpus)
    with torch.inference_mode():
        drive(
            stage_loop(role, executor),
            control,
            links,
            timeline,
            config.link_timeout,
        )


def _failure(config: RankConfig, epoch: int, timeline: RankTimeline, error: Exception) -> Failure:
    expected = isinstance(error, HeadraceError | LinkError)
    message = str(error) if expected else f"internal error: {type(error).__name__}: {error}"
    return Failure(
        epoch=epoch,
        rank=config.rank,
        kind=type(error).__name__ if isinstance(error, HeadraceError) else "PipelineError",
        message=" ".join(message.split()),
        step=timeline.computes,
        lost_peer=error.peer if isinstance(error, LinkError) else None,
        details=traceback.format_exc(),
    )


def run(control_address: str, watch_address: str, cpus: set[int]) -> int:
    """Run one stage, controlled and watched over two sockets; 0 only after an ordered stop.

    The sockets lie in the engine's folder. cpus: where this thread computes, once all other threads
    are there.
    """
    folder = Path(control_address.removeprefix("ipc://")).parent
    context = zmq.Context()
    control = ControlSocket(control_address, context)
    config = control.receive()
    assert isinstance(config, RankConfig)
    watch = Watch(RankTimeline(config.epoch, config.rank))
    answer_when_asked(context, watch_address, watch)
    try:
        run_stage(config, control, watch, folder, cpus)
    except Exception as error:
        control.send(_failure(config, watch.timeline.epoch, watch.timeline, error))
        control.close()
        context.term()
        # Not a return: a broken link's threads may hold the interpreter's exit back for ever.
        os._exit(1)
    control.close()
    context.term()
    return 0
