"""The real scheduler and the real stage loops on virtual links, in one process.

Every choice of what happens next comes from one seeded generator, so a failure replays from its
seed. Virtual links behave as gloo does: a transfer completes only once both ends have started it,
transfers of one edge complete in order, edges are independent of each other.
"""

import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.engine.request import Sequence
from headrace.engine.scheduler import Scheduler
from headrace.pipeline.effects import (
    Compute,
    Effect,
    EmitResult,
    PostReceive,
    Send,
    StepDone,
    TakePlans,
    Wait,
)
from headrace.pipeline.ledger import Channel, Ledger
from headrace.pipeline.links import edges
from headrace.pipeline.stage_loop import Executor, StageRole, stage_loop
from headrace.protocol import codec
from headrace.protocol.messages import Result, Stop
from headrace.protocol.plan import Plan


class Deadlock(Exception):
    """Nothing can happen any more although work is left."""


@dataclass(eq=False)
class _Transfer:
    """One end of a transfer; waiting is allowed only once it is complete."""

    complete: bool = False

    def wait(self, timeout_s: float) -> float:
        assert self.complete, "the simulator resumed a stage too early"
        return 0.0


@dataclass
class _Edge:
    sends: deque[tuple[torch.Tensor, _Transfer]] = field(default_factory=deque)
    receives: deque[tuple[torch.Tensor, _Transfer]] = field(default_factory=deque)

    @property
    def deliverable(self) -> bool:
        return bool(self.sends and self.receives)

    def deliver(self) -> None:
        tensor, sent = self.sends.popleft()
        buffer, received = self.receives.popleft()
        assert tensor.shape == buffer.shape, (tensor.shape, buffer.shape)
        assert tensor.dtype == buffer.dtype
        buffer.copy_(tensor)
        sent.complete = received.complete = True


class _Stage:
    """Drives one stage loop; holds the effect that is not carried out yet."""

    def __init__(self, role: StageRole, executor: Executor, links: dict[Channel, _Edge]) -> None:
        self.role = role
        self.inbox: deque[bytes] = deque()
        self.results: deque[bytes] = deque()
        self.done = False
        self._links = links
        self._ledger = Ledger()
        self._handles: dict[tuple[Channel, int], _Transfer] = {}
        self._buffers: dict[_Transfer, int] = {}
        self._loop: Generator[Effect, Any, None] = stage_loop(role, executor)
        self._pending: Effect = next(self._loop)

    @property
    def ready(self) -> bool:
        """Whether the pending effect can be carried out now."""
        if self.done:
            return False
        if isinstance(self._pending, TakePlans):
            return bool(self.inbox) or not self._pending.wait
        if isinstance(self._pending, Wait):
            handle = self._handles.get((self._pending.channel, self._pending.step))
            # Without a handle the ledger is to raise its error.
            return handle is None or handle.complete
        return True

    def advance(self) -> None:
        value: Any = None
        match self._pending:
            case TakePlans():
                value = []
                while self.inbox:
                    value.append(codec.decode_to_stage(self.inbox.popleft()))
            case PostReceive(channel, step, buffer):
                handle = self._start(channel, step, buffer)
                self._links[channel].receives.append((buffer, handle))
            case Send(channel, step, tensor):
                handle = self._start(channel, step, tensor)
                self._links[channel].sends.append((tensor, handle))
            case Wait(channel, step):
                value = self._ledger.wait(channel, step, timeout_s=1.0).buffer
                del self._buffers[self._handles.pop((channel, step))]
            case Compute(_, _, work):
                value = work()
            case EmitResult(result):
                self.results.append(codec.encode(result))
            case StepDone():
                pass
        try:
            self._pending = self._loop.send(value)
        except StopIteration:
            assert list(self._ledger.open_transfers()) == []
            self.done = True

    def describe(self) -> str:
        return "done" if self.done else repr(self._pending)

    def _start(self, channel: Channel, step: int, tensor: torch.Tensor) -> _Transfer:
        handle = _Transfer()
        for (other, _), transfer in self._handles.items():
            # Two messages into one place of the ring: the later would overwrite the earlier.
            assert (
                other != channel
                or channel.target != self.role.stage
                or self._buffers[transfer] != tensor.data_ptr()
            ), "a buffer was given out again before its transfer was waited for"
        self._buffers[handle] = tensor.data_ptr()
        self._ledger.open(channel, step, handle, tensor)
        self._handles[channel, step] = handle
        return handle


@dataclass
class Simulation:
    """Runs sequences to their end. arrivals and aborts happen at random moments."""

    seed: int
    scheduler: Scheduler
    executors: list[Executor]
    window: int
    max_rows: int
    arrivals: list[Sequence]
    aborts: list[Sequence] = field(default_factory=list)
    blocking_feedback: bool = False
    plans: list[Plan] = field(default_factory=list)

    def run(self) -> None:
        """Until every sequence ended and every stage drained; raises Deadlock if that fails."""
        rng = random.Random(self.seed)
        num_stages = len(self.executors)
        links = {edge: _Edge() for edge in edges(num_stages)}
        roles = [
            StageRole(n, num_stages, 0, self.window, self.max_rows, self.blocking_feedback)
            for n in range(num_stages)
        ]
        stages = [
            _Stage(role, executor, links)
            for role, executor in zip(roles, self.executors, strict=True)
        ]
        # Messages on their way: each socket is ordered, but as slow as the seed says.
        ways: list[deque[bytes]] = [deque() for _ in stages]
        arrivals, aborts = deque(self.arrivals), deque(self.aborts)
        stopped = False
        while not all(stage.done for stage in stages):
            actions: list[Any] = [stage.advance for stage in stages if stage.ready]
            actions += [edge.deliver for edge in links.values() if edge.deliverable]
            actions += [
                (lambda s=stage, w=way: s.inbox.append(w.popleft()))
                for stage, way in zip(stages, ways, strict=True)
                if way
            ]
            if stages[-1].results:
                actions.append(lambda: self._take_result(stages[-1].results.popleft()))
            if arrivals:
                actions.append(lambda: self.scheduler.add(arrivals.popleft()))
            if aborts and aborts[0] not in arrivals:
                actions.append(lambda: self.scheduler.finish(aborts.popleft(), "abort"))
            if not stopped:
                actions.append(None)
            action = rng.choice(actions) if actions else None
            if action is not None:
                action()
                continue
            # The engine's turn: plan, or stop when all is done.
            plan = None if stopped else self.scheduler.plan()
            if plan is not None:
                self.plans.append(plan)
                for way in ways:
                    way.append(codec.encode(plan))
            elif self.scheduler.idle and not arrivals and not aborts and not stopped:
                stopped = True
                for way in ways:
                    way.append(codec.encode(Stop(0)))
            elif len(actions) == (0 if stopped else 1):
                states = "; ".join(f"stage {s.role.stage}: {s.describe()}" for s in stages)
                raise Deadlock(f"seed {self.seed}: {states}")

    def _take_result(self, data: bytes) -> None:
        result = codec.decode_from_stage(data)
        assert isinstance(result, Result)
        self.scheduler.take_result(result)
