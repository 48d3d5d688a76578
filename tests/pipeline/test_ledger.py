from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.pipeline.ledger import Channel, Ledger, LedgerError, Tensors

A = Channel(Tensors.ACTIVATIONS, 0, 1)
B = Channel(Tensors.FEEDBACK, 1, 0)


class Broken(Exception):
    pass


@dataclass
class Handle:
    fails: bool = False
    waits: int = 0

    def wait(self, timeout_s: float) -> float:
        self.waits += 1
        if self.fails:
            raise Broken
        return 1.5


class AnyOrder(RuleBasedStateMachine):
    """Whatever is called in whatever order, each handle is waited for at most once."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.newest: dict[Channel, int] = {A: -1, B: -1}
        self.open: dict[tuple[Channel, int], tuple[Handle, torch.Tensor]] = {}
        self.handles: list[Handle] = []

    @rule(channel=st.sampled_from([A, B]), step=st.integers(0, 12), fails=st.booleans())
    def start(self, channel: Channel, step: int, fails: bool) -> None:
        handle, buffer = Handle(fails), torch.zeros(1)
        if step <= self.newest[channel]:
            with pytest.raises(LedgerError):
                self.ledger.open(channel, step, handle, buffer)
            return
        self.ledger.open(channel, step, handle, buffer)
        self.newest[channel] = step
        self.open[channel, step] = handle, buffer
        self.handles.append(handle)

    @rule(channel=st.sampled_from([A, B]), step=st.integers(0, 14))
    def wait(self, channel: Channel, step: int) -> None:
        handle, buffer = self.open.pop((channel, step), (None, None))
        if handle is None:
            with pytest.raises(LedgerError):
                self.ledger.wait(channel, step, 1.0)
        elif handle.fails:
            with pytest.raises(Broken):
                self.ledger.wait(channel, step, 1.0)
        else:
            assert self.ledger.wait(channel, step, 1.0) == (buffer, 1.5)

    @invariant()
    def nothing_is_lost_or_waited_for_twice(self) -> None:
        assert set(self.ledger.open_transfers()) == set(self.open)
        assert all(handle.waits <= 1 for handle in self.handles)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, deadline=None)


def test_errors_name_the_edge_the_step_and_what_went_wrong() -> None:
    ledger = Ledger()
    ledger.open(A, 3, Handle(), torch.zeros(1))
    with pytest.raises(LedgerError, match="activations 0->1 of step 3 opened twice"):
        ledger.open(A, 3, Handle(), torch.zeros(1))
    ledger.wait(A, 3, 1.0)
    with pytest.raises(LedgerError, match="activations 0->1 of step 3 waited for twice"):
        ledger.wait(A, 3, 1.0)
    with pytest.raises(LedgerError, match="feedback 1->0 of step 9 was never started"):
        ledger.wait(B, 9, 1.0)
