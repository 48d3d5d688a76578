"""What is done with a stage loop's effects, whoever lets the time pass."""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from headrace.pipeline.carry_out import carry_out
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
from headrace.pipeline.ledger import Channel, Ledger, LedgerError, Tensors
from headrace.pipeline.timeline import RankTimeline
from headrace.protocol.messages import FromRank, Result, Stop
from headrace.protocol.plan import Plan

IN = Channel(Tensors.ACTIVATIONS, 0, 1)
OUT = Channel(Tensors.ACTIVATIONS, 1, 2)


@dataclass
class World:
    """A rank's surroundings; log: what reached them, in order."""

    log: list[str] = field(default_factory=list)

    def send(self, message: FromRank) -> None:
        self.log.append(type(message).__name__)

    def take_plans(self, wait: bool) -> list[Plan | Stop]:
        self.log.append("plans")
        return [Plan(0, 0, 0, [], [], [], [])] if wait else []

    def carry_out(self, loop: Generator[Effect, Any, None]) -> Generator[Effect | None, None, None]:
        timeline = RankTimeline(epoch=0, rank=1, memory=lambda: 0)
        links = {IN: Link(self.log), OUT: Link(self.log)}
        return carry_out(loop, self, links, Ledger(), timeline, link_timeout=1.0, clock=lambda: 0.0)


@dataclass
class Link:
    log: list[str]

    def send(self, tensor: torch.Tensor) -> "Link":
        self.log.append("send")
        return self

    def receive(self, buffer: torch.Tensor, watched: bool = True) -> "Link":
        self.log.append("receive")
        return self

    def wait(self, timeout_s: float) -> None:
        self.log.append("wait")


def test_an_effect_is_shown_before_it_is_carried_out() -> None:
    world, buffer = World(), torch.zeros(1)
    effects: list[Effect] = [
        TakePlans(wait=True),
        PostReceive(IN, 0, buffer),
        Wait(IN, 0),
        Compute("forward", 0, lambda: world.log.append("work")),
        Send(OUT, 0, buffer),
        Wait(OUT, 0),
        EmitResult(Result(0, 0, [], [])),
    ]
    done = {}
    for effect in world.carry_out(loop_of(effects)):
        done[type(effect).__name__] = list(world.log)
    order = ["plans", "receive", "wait", "work", "send", "wait", "Result"]
    assert world.log == order
    assert done["TakePlans"] == []
    assert done["PostReceive"] == order[:1]
    assert done["Compute"] == order[:3]
    # Computing ends: what it takes passes with its work begun.
    assert done["NoneType"] == order[:4]
    assert done["Send"] == order[:4]
    assert done["EmitResult"] == order[:6]


def test_reports_wait_until_plans_are_taken_or_the_loop_ends() -> None:
    world = World()
    effects: list[Effect] = [
        TakePlans(wait=True),
        StepDone(0),
        EmitResult(Result(0, 0, [], [])),
        TakePlans(wait=True),
        StepDone(1),
    ]
    for _ in world.carry_out(loop_of(effects)):
        pass
    assert world.log == ["plans", "Result", "Report", "plans", "Report"]


def test_a_loop_must_not_end_before_it_has_waited_for_every_transfer() -> None:
    loop = loop_of([Send(OUT, 0, torch.zeros(1))])
    with pytest.raises(LedgerError, match="not waited for"):
        list(World().carry_out(loop))


def loop_of(effects: list[Effect]) -> Generator[Effect, Any, None]:
    # Values are sent back in, which a list's iterator does not take.
    for effect in effects:
        _ = yield effect
