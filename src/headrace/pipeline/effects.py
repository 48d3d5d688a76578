"""What a stage loop yields: every wait, every send, every piece of work. No I/O here.

Its driver carries each effect out and sends its value back in (pipeline/carry_out.py): over links
and sockets in pipeline/stage_worker.py, in virtual time in simulation/virtual_stages.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headrace.pipeline.ledger import Channel, Tensors
from headrace.protocol.messages import ActivityKind, Result


def wait_kind(channel: Channel, rank: int) -> ActivityKind:
    """What a rank's wait for a transfer of this channel is called."""
    if channel.source == rank:
        return "send_wait"
    return "feedback_wait" if channel.tensors is Tensors.FEEDBACK else "activation_wait"


@dataclass(frozen=True, slots=True)
class TakePlans:
    """Value: list[Plan | Stop], those that arrived. wait: block until there is at least one."""

    wait: bool


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Start receiving into buffer. Never blocks. Value: None."""

    channel: Channel
    step: int
    buffer: torch.Tensor


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending the tensor; the ledger keeps it until waited for. Never blocks. Value: None."""

    channel: Channel
    step: int
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a transfer started before. Value: its buffer."""

    channel: Channel
    step: int


WorkKind = Literal["forward", "sample"]


@dataclass(frozen=True, slots=True)
class Compute:
    """Run `work`, which only computes. Value: what it returns."""

    kind: WorkKind
    step: int
    work: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Start:
    """Run `work`, which gives a device something to do and does not wait for it. Value: what it
    returns. Until Finish the loop only takes plans and posts their receives."""

    kind: WorkKind
    step: int
    work: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Finish:
    """Wait, by `work`, until the device has done what was started. Value: None."""

    kind: WorkKind
    step: int
    work: Callable[[], None]


@dataclass(frozen=True, slots=True)
class EmitResult:
    """Tell the engine what the step sampled. Value: None."""

    result: Result


@dataclass(frozen=True, slots=True)
class StepDone:
    """The stage is done with the step: a moment for a report. Value: None."""

    step: int


Effect = TakePlans | PostReceive | Send | Wait | Compute | Start | Finish | EmitResult | StepDone
