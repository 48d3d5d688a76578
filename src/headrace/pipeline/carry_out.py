"""Carries out what a stage loop yields: the same in earnest and in virtual time.

What differs is how time passes, and that is the caller's: it is given every effect at the moment
when the effect is due, and goes on when it may be carried out.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

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
    wait_kind,
)
from headrace.pipeline.ledger import Channel, Ledger, LedgerError
from headrace.pipeline.links import Link
from headrace.pipeline.timeline import RankTimeline
from headrace.protocol.messages import FromRank, Report, Stop
from headrace.protocol.plan import Plan

# One step in so many has its transfers watched, on all stages the same: enough to know how long
# links take.
_WATCHED_STEPS = 4


class Control(Protocol):
    """A rank's end of its ordered socket to the engine."""

    def send(self, message: FromRank) -> None:
        """Queue a message to the engine."""

    def take_plans(self, wait: bool) -> list[Plan | Stop]:
        """All plans that have arrived; wait: at least one, however long that takes."""


def carry_out(
    loop: Generator[Effect, Any, None],
    control: Control,
    links: Mapping[Channel, Link],
    ledger: Ledger,
    timeline: RankTimeline,
    *,
    link_timeout: float,
    clock: Callable[[], float],
) -> Generator[Effect | None, None, None]:
    """Carry out a stage loop's effects until it ends.

    Yields each effect just before it is carried out: a caller that must not block goes on once
    plans are there (TakePlans that waits) or the transfer is over (Wait). Yields None where
    computing ends: such a caller goes on when the time that it takes has passed. In a real stage
    each of them blocks by itself. clock: seconds, that of the time line.

    Reports wait until plans are taken, when nobody waits for the stage or a device computes.
    LedgerError if the loop ends before it has waited for every transfer.
    """
    rank = timeline.rank
    reports: list[Report] = []
    value: Any = None
    while True:
        try:
            effect = loop.send(value)
        except StopIteration:
            break
        value = None
        match effect:
            case TakePlans(wait):
                for report in reports:
                    control.send(report)
                reports.clear()
                if wait:
                    timeline.begin("plan_wait", timeline.step, clock())
                yield effect
                value = control.take_plans(wait)
                if wait:
                    timeline.end(clock())
                for message in value:
                    if isinstance(message, Plan):
                        timeline.planned(message)
            case PostReceive(channel, step, buffer):
                yield effect
                handle = links[channel].receive(buffer, watched=step % _WATCHED_STEPS == 0)
                ledger.open(channel, step, handle, buffer)
            case Send(channel, step, tensor):
                yield effect
                timeline.begin("send", step, clock())
                ledger.open(channel, step, links[channel].send(tensor), tensor)
                timeline.end(clock())
            case Wait(channel, step):
                timeline.begin(wait_kind(channel, rank), step, clock())
                yield effect
                value, at = ledger.wait(channel, step, link_timeout)
                timeline.end(clock())
                if channel.target == rank and at is not None:
                    timeline.arrived(step, at)
            case Compute(kind, step, work):
                yield effect
                timeline.begin(kind, step, clock())
                value = work()
                yield None
                timeline.end(clock())
            case Start(kind, step, work):
                yield effect
                timeline.begin(kind, step, clock())
                value = work()
            case Finish(work=wait_for_device):
                yield effect
                wait_for_device()
                yield None
                timeline.end(clock())
            case EmitResult(result):
                yield effect
                control.send(result)
            case StepDone():
                yield effect
                reports.append(timeline.finish(clock()))
    for report in reports:
        control.send(report)
    if left := list(ledger.open_transfers()):
        raise LedgerError(f"rank {rank} ended with {left} not waited for")
