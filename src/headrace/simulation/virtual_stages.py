"""All stages of a pipeline in one process and in virtual time: real stage loops, no waiting.

To the engine it is a pipeline like any other, on a clock that only moves when it is asked for
messages. Simulations of the whole engine run on it, and searches that would take hours in earnest.
"""

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch

from headrace.errors import PipelineError
from headrace.execution.executor import Executor
from headrace.pipeline.effects import (
    Compute,
    Effect,
    EmitResult,
    Finish,
    PostReceive,
    Send,
    Start,
    StepDone,
    TakePlans,
    Wait,
    WorkKind,
    wait_kind,
)
from headrace.pipeline.ledger import Channel, Ledger, LedgerError
from headrace.pipeline.links import LinkError
from headrace.pipeline.stage_loop import StageRole, stage_loop
from headrace.pipeline.timeline import RankTimeline
from headrace.protocol import codec
from headrace.protocol.messages import Report, Result, Stop, Timeline
from headrace.protocol.plan import Plan
from headrace.protocol.ranks import Ranks
from headrace.simulation.virtual_links import VirtualClock, VirtualNetwork, VirtualTransfer

# Seconds that a stage takes for all of a step's work of one kind.
ComputeTime = Callable[[int, Plan, WorkKind], float]

# Events remembered, for the account of a failure.
_EVENTS = 40
# In place of an effect's value: it takes time.
_LATER = object()


def no_time(*_: object) -> float:
    """Whatever it is for takes no time."""
    return 0.0


class VirtualStages:
    """The engine's Pipeline, in virtual time.

    executors: by rank; num_shards: how many of them are a stage. window: the most steps that are
    planned beyond the newest result. compute_s(rank, plan, kind): what work takes.
    socket_delay(rank): what a message between the engine and the rank takes on its way, asked for
    each; none overtakes another of the same socket and direction. hold_up(rank): how long a rank's
    process is kept from going on, asked before everything that it does. link_timeout: seconds
    after which a wait for a transfer fails.

    killed: whether the stages are gone. events: what happened last, (moment, who, what), the newest
    last.
    """

    def __init__(
        self,
        clock: VirtualClock,
        network: VirtualNetwork,
        executors: list[Executor],
        window: int,
        max_rows: int,
        *,
        num_shards: int = 1,
        epoch: int = 0,
        blocking_feedback: bool = False,
        compute_s: ComputeTime = no_time,
        socket_delay: Callable[[int], float] = no_time,
        hold_up: Callable[[int], float] = no_time,
        link_timeout: float = 60.0,
    ) -> None:
        self.events: deque[tuple[float, str, object]] = deque(maxlen=_EVENTS)
        self._clock = clock
        self._epoch = epoch
        self._inbox: list[bytes] = []
        self.killed = False
        self._heard_at = [0.0] * len(executors)
        self._ranks = ranks = Ranks(len(executors) // num_shards, num_shards)
        self._by_rank = [
            _Rank(
                StageRole(n, ranks, epoch, window, max_rows, blocking_feedback),
                executor,
                clock,
                network,
                partial(compute_s, n),
                partial(hold_up, n),
                _Socket(clock, partial(socket_delay, n), partial(self._hear, n)),
                link_timeout,
                self.events,
            )
            for n, executor in enumerate(executors)
        ]
        self._plans_to = [
            _Socket(clock, partial(socket_delay, n), rank.take)
            for n, rank in enumerate(self._by_rank)
        ]

    def send(self, plan: Plan) -> None:
        """Give the plan to every rank, in order."""
        self.events.append((self._clock.now, "engine", plan))
        for socket, data in zip(self._plans_to, codec.encode_plan(plan, self._ranks), strict=True):
            socket.send(data)

    def send_to(self, rank: int, message: Plan | Stop) -> None:
        """Give a message to one rank alone."""
        to = f"to {self._ranks.name(rank)} alone"
        self.events.append((self._clock.now, to, message))
        self._plans_to[rank].send(codec.encode(message))

    def receive(self, timeout_s: float) -> list[Result | Report]:
        """Messages of this epoch that arrived, after up to timeout_s of virtual time for the first.

        PipelineError if a transfer of a stage failed, or if nothing is left of stages that were
        killed. A fault in a stage is raised as it is.
        """
        if self.killed and not self._inbox:
            raise PipelineError("the stages were killed")
        until = self._clock.now + timeout_s
        while not self._inbox and self._clock.run_next(until):
            pass
        messages: list[Result | Report] = []
        for data in self._inbox:
            message = codec.decode_from_rank(data)
            assert isinstance(message, Result | Report)
            if message.epoch == self._epoch:
                messages.append(message)
        self._inbox.clear()
        return messages

    def timelines(self, last: int, timeout_s: float) -> list[Timeline]:
        """At most the last so many activities of each rank; nobody needs time to answer."""
        return [rank.timeline.show(last, self._clock.now) for rank in self._by_rank]

    def signs_of_life(self) -> list[float]:
        """When the last message of each rank came, by its number."""
        return list(self._heard_at)

    def stop(self) -> None:
        """Have the stages run the plans that they have, drain their links and end."""
        for rank in range(self._ranks.count):
            self.send_to(rank, Stop(self._epoch))
        while not all(rank.done for rank in self._by_rank):
            if not self._clock.run_next():
                waiting = " and ".join(
                    self._ranks.name(n) for n, rank in enumerate(self._by_rank) if not rank.done
                )
                raise PipelineError(f"{waiting} was told to stop and does not")

    def kill(self) -> None:
        """All stages are gone at once; what they sent to the engine before still arrives."""
        self.killed = True
        for rank in self._by_rank:
            rank.killed = True

    def _hear(self, rank: int, data: bytes) -> None:
        self._heard_at[rank] = self._clock.now
        self._inbox.append(data)


class _Socket:
    """One direction of an ordered socket."""

    def __init__(
        self, clock: VirtualClock, delay: Callable[[], float], deliver: Callable[[bytes], None]
    ) -> None:
        self._clock, self._delay, self._deliver = clock, delay, deliver
        self._on_their_way: deque[bytes] = deque()
        self._newest_at = 0.0

    def send(self, data: bytes) -> None:
        self._newest_at = max(self._clock.now + self._delay(), self._newest_at)
        self._on_their_way.append(data)
        self._clock.schedule_at(self._newest_at, self._arrive)

    def _arrive(self) -> None:
        self._deliver(self._on_their_way.popleft())


class _Rank:
    """Carries a stage loop's effects out until one takes time, and goes on when it is over.

    The same as stage_worker.drive() in virtual time.
    """

    def __init__(
        self,
        role: StageRole,
        executor: Executor,
        clock: VirtualClock,
        network: VirtualNetwork,
        compute_s: Callable[[Plan, WorkKind], float],
        hold_up: Callable[[], float],
        to_engine: _Socket,
        link_timeout: float,
        events: deque[tuple[float, str, object]],
    ) -> None:
        self.timeline = RankTimeline(role.epoch, role.rank, memory=lambda: 0)
        self.done = self.killed = False
        self._role = role
        self._clock = clock
        self._links = network.links(role.rank)
        self._compute_s = compute_s
        self._hold_up = hold_up
        self._to_engine = to_engine
        self._link_timeout = link_timeout
        self._events = events
        self._name = role.ranks.name(role.rank)
        self._inbox: list[bytes] = []
        self._waits_for_plans = False
        self._ledger = Ledger()
        self._transfers: dict[tuple[Channel, int], VirtualTransfer] = {}
        self._plans: dict[int, Plan] = {}
        self._device_busy_until = 0.0
        # Kinds of work that this step has been charged for.
        self._charged: set[str] = set()
        self._loop: Generator[Effect, Any, None] = stage_loop(role, executor)
        self._go_on(None)

    def take(self, data: bytes) -> None:
        """A message from the engine arrived."""
        if self.killed:
            return
        self._inbox.append(data)
        if self._waits_for_plans:
            self._waits_for_plans = False
            self.timeline.end(self._clock.now)
            self._go_on(self._messages())

    def _go_on(self, value: Any) -> None:
        """Give the loop the value that it waits for, and carry out what it wants until that takes
        time; then this is called again."""
        while value is not _LATER:
            try:
                effect = self._loop.send(value)
            except StopIteration:
                self.done = True
                if left := list(self._ledger.open_transfers()):
                    raise LedgerError(f"{self._name} ended with {left} not waited for") from None
                return
            held_up_s = self._hold_up()
            if held_up_s > 0:
                self._clock.schedule(held_up_s, partial(self._after_hold_up, effect))
                return
            value = self._carry_out(effect)

    def _after_hold_up(self, effect: Effect) -> None:
        if not self.killed:
            self._go_on(self._carry_out(effect))

    def _carry_out(self, effect: Effect) -> Any:
        """The effect's value, or _LATER."""
        now = self._clock.now
        self._events.append((now, self._name, effect))
        match effect:
            case TakePlans(wait):
                if wait:
                    self.timeline.begin("plan_wait", self.timeline.step, now)
                    if not self._inbox:
                        self._waits_for_plans = True
                        return _LATER
                    self.timeline.end(now)
                return self._messages()
            case PostReceive(channel, step, buffer):
                self._start(channel, step, self._links[channel].receive, buffer)
            case Send(channel, step, tensor):
                self.timeline.begin("send", step, now)
                self._start(channel, step, self._links[channel].send, tensor)
                self.timeline.end(now)
            case Wait(channel, step):
                self.timeline.begin(wait_kind(channel, self._role.rank), step, now)
                transfer = self._transfers.pop((channel, step), None)
                if transfer is not None and not transfer.over:
                    transfer.watch(self._link_timeout, partial(self._transferred, channel, step))
                    return _LATER
                # Without one the ledger raises its error.
                return self._complete(channel, step)
            case Compute(kind, step, work):
                self.timeline.begin(kind, step, now)
                value = work()
                if kind not in self._charged:
                    self._charged.add(kind)
                    seconds = self._compute_s(self._plans[step], kind)
                    if seconds > 0:
                        self._clock.schedule(seconds, partial(self._computed, value))
                        return _LATER
                self.timeline.end(now)
                return value
            case Start(kind, step, work):
                self.timeline.begin(kind, step, now)
                self._device_busy_until = now + self._compute_s(self._plans[step], kind)
                return work()
            case Finish():
                if self._device_busy_until > now:
                    self._clock.schedule_at(self._device_busy_until, partial(self._computed, None))
                    return _LATER
                self.timeline.end(now)
            case EmitResult(result):
                self._to_engine.send(codec.encode(result))
            case StepDone(step):
                del self._plans[step]
                self._charged.clear()
                self._to_engine.send(codec.encode(self.timeline.finish(now)))
        return None

    def _messages(self) -> list[Plan | Stop]:
        """All that have arrived."""
        messages: list[Plan | Stop] = []
        for data in self._inbox:
            message = codec.decode_to_rank(data)
            assert isinstance(message, Plan | Stop)
            messages.append(message)
            if isinstance(message, Plan):
                self.timeline.planned(message)
                if message.epoch == self._role.epoch:
                    self._plans[message.step] = message
        self._inbox.clear()
        return messages

    def _start(
        self,
        channel: Channel,
        step: int,
        start: Callable[[torch.Tensor], VirtualTransfer],
        tensor: torch.Tensor,
    ) -> None:
        try:
            transfer = start(tensor)
        except LinkError as error:
            raise self._failed(error) from error
        self._ledger.open(channel, step, transfer, tensor)
        self._transfers[channel, step] = transfer

    def _complete(self, channel: Channel, step: int) -> torch.Tensor:
        """Take a transfer that is over out of the ledger."""
        try:
            buffer, at = self._ledger.wait(channel, step, self._link_timeout)
        except LinkError as error:
            raise self._failed(error) from error
        self.timeline.end(self._clock.now)
        if channel.target == self._role.rank and at is not None:
            self.timeline.arrived(step, at)
        return buffer

    def _transferred(self, channel: Channel, step: int) -> None:
        if not self.killed:
            self._go_on(self._complete(channel, step))

    def _computed(self, value: Any) -> None:
        if not self.killed:
            self.timeline.end(self._clock.now)
            self._go_on(value)

    def _failed(self, error: LinkError) -> PipelineError:
        return PipelineError(f"{self._name}: {error}")
