import gc
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.pipeline.ledger import Channel, Ledger, LedgerError, Tensors
from headrace.pipeline.links import LinkError

A = Channel(Tensors.ACTIVATIONS, 0, 1)
B = Channel(Tensors.FEEDBACK, 1, 0)
TIMEOUT_S = 5.0


@dataclass
class Clock:
    now: float = 0.0


@dataclass
class Handle:
    """A transfer that is complete, or fails, at a moment of a clock of its own kind of time."""

    clock: Clock
    over_at: float
    fails: bool = False
    timeouts: list[float] = field(default_factory=list)

    def wait(self, timeout_s: float) -> float:
        self.timeouts.append(timeout_s)
        if self.over_at > self.clock.now + timeout_s:
            self.clock.now += timeout_s
            raise LinkError("late", 1)
        self.clock.now = max(self.clock.now, self.over_at)
        if self.fails:
            raise LinkError("gone", 1)
        return self.over_at


@dataclass
class Opened:
    """What a test remembers of an open transfer. Not the buffer: that is the ledger's."""

    handle: Handle
    buffer: "weakref.ref[torch.Tensor]"
    content: int


class AnyOrder(RuleBasedStateMachine):
    """Whatever is called in whatever order, and however the transfers complete."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.clock = Clock()
        self.newest: dict[Channel, int] = {A: -1, B: -1}
        self.open: dict[tuple[Channel, int], Opened] = {}
        self.handles: list[Handle] = []

    @rule(
        channel=st.sampled_from([A, B]),
        ahead=st.integers(-2, 3),
        # Before the wait, during it, at its very deadline, never.
        takes=st.sampled_from([0.0, 1.0, TIMEOUT_S, 1e9]),
        fails=st.booleans(),
    )
    def start(self, channel: Channel, ahead: int, takes: float, fails: bool) -> None:
        step = max(0, self.newest[channel] + ahead)
        handle = Handle(self.clock, self.clock.now + takes, fails)
        content = len(self.handles)
        buffer = torch.full((1,), content)
        if step <= self.newest[channel]:
            with pytest.raises(LedgerError):
                self.ledger.open(channel, step, handle, buffer)
            return
        self.ledger.open(channel, step, handle, buffer)
        self.newest[channel] = step
        self.open[channel, step] = Opened(handle, weakref.ref(buffer), content)
        self.handles.append(handle)

    @rule(seconds=st.sampled_from([0.5, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(channel=st.sampled_from([A, B]), back=st.integers(-2, 6))
    def wait(self, channel: Channel, back: int) -> None:
        step = max(0, self.newest[channel] - back)
        opened = self.open.pop((channel, step), None)
        began = self.clock.now
        if opened is None:
            with pytest.raises(LedgerError):
                self.ledger.wait(channel, step, TIMEOUT_S)
            assert self.clock.now == began, "an error took its time"
            return
        handle = opened.handle
        in_time = handle.over_at <= began + TIMEOUT_S
        if in_time and not handle.fails:
            buffer, at = self.ledger.wait(channel, step, TIMEOUT_S)
            assert buffer is opened.buffer()
            assert buffer.item() == opened.content
            assert at == handle.over_at
            assert self.clock.now == max(began, handle.over_at)
        else:
            with pytest.raises(LinkError, match="gone" if in_time else "late"):
                self.ledger.wait(channel, step, TIMEOUT_S)
            assert self.clock.now <= began + TIMEOUT_S
        assert handle.timeouts == [TIMEOUT_S]

    @invariant()
    def nothing_is_lost_or_waited_for_twice(self) -> None:
        assert set(self.ledger.open_transfers()) == set(self.open)
        assert all(len(handle.timeouts) <= 1 for handle in self.handles)

    @invariant()
    def buffers_of_open_transfers_live(self) -> None:
        assert all(opened.buffer() is not None for opened in self.open.values())

    def teardown(self) -> None:
        """A drain completes what is open, each channel in step order, and lets all buffers go."""
        buffers = [opened.buffer for opened in self.open.values()]
        for channel, step in list(self.ledger.open_transfers()):
            opened = self.open.pop((channel, step))
            opened.handle.over_at, opened.handle.fails = self.clock.now, False
            self.ledger.wait(channel, step, TIMEOUT_S)
        assert list(self.ledger.open_transfers()) == []
        gc.collect(0)
        assert all(buffer() is None for buffer in buffers)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_errors_name_the_edge_the_step_and_what_went_wrong() -> None:
    ledger = Ledger()
    handle = Handle(Clock(), 0.0)
    ledger.open(A, 3, handle, torch.zeros(1))
    with pytest.raises(LedgerError, match="activations 0->1 of step 3 opened twice"):
        ledger.open(A, 3, handle, torch.zeros(1))
    ledger.wait(A, 3, 1.0)
    with pytest.raises(LedgerError, match="activations 0->1 of step 3 waited for twice"):
        ledger.wait(A, 3, 1.0)
    with pytest.raises(LedgerError, match="feedback 1->0 of step 9 was never started"):
        ledger.wait(B, 9, 1.0)


def test_a_transfer_that_failed_is_done_and_not_waited_for_again() -> None:
    ledger = Ledger()
    handle = Handle(Clock(), 0.0, fails=True)
    ledger.open(A, 0, handle, torch.zeros(1))
    with pytest.raises(LinkError):
        ledger.wait(A, 0, 1.0)
    with pytest.raises(LedgerError, match="waited for twice"):
        ledger.wait(A, 0, 1.0)
    assert handle.timeouts == [1.0]
