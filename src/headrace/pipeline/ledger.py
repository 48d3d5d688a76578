"""Every transfer in flight, with its buffer: contract 2, point 4.

A transfer is known by its channel and step and lives through three states:

    (unknown) --open--> open --wait--> done

| call | unknown     | open          | done        |
| ---- | ----------- | ------------- | ----------- |
| open | ok          | LedgerError   | LedgerError |
| wait | LedgerError | ok, then done | LedgerError |

A channel's transfers are opened in step order (else LedgerError, which leaves the ledger as it
was), so that "done" is one number per channel instead of a growing set; a step below that number
that was never opened counts as done. They may be waited for in any order.

Who calls what: the stage loop decides, as effects; its driver starts a transfer on the link and
opens it here in one go (PostReceive, Send), and waits here (Wait). Nobody waits on a handle past
the ledger. When the loop ends it has waited for everything: open_transfers() is empty.

Whose the buffer is: the transfer's from open() until wait() returns, and nobody may write to it,
nor read a received one. The ledger keeps it alive so long; from then on it is the caller's.

When the transfer completes, as wait() sees it:

| complete           | wait()                                                                    |
| ------------------ | ------------------------------------------------------------------------- |
| early, before it   | returns at once                                                           |
| late, during it    | returns then                                                              |
| never, by timeout  | raises LinkError at the deadline                                          |
| with an error      | raises LinkError as soon as the handle knows, at once if it already does  |

`at` says when it was complete, however late that was noticed. Whatever the handle raises is passed
on, and the transfer is done all the same: no link survives a failed wait, so there is nothing to
repeat, and the pipeline ends. Its buffer is then lost: the backend may still write to it, and keeps
it alive itself.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class Tensors(enum.StrEnum):
    """What an edge carries. Of sums, which lie in memory, only whose they are."""

    ACTIVATIONS = "activations"
    FEEDBACK = "feedback"
    SUMS = "sums"


class Channel(NamedTuple):
    """One end of a directed edge, as the stage that holds the ledger sees it."""

    tensors: Tensors
    source: int
    target: int


class Handle(Protocol):
    """A transfer that was started; each backend says what waiting for it means."""

    def wait(self, timeout_s: float) -> float | None:
        """Return when the buffer may be used again; LinkError if it cannot be.

        Returns the moment from which it could have been, in seconds of the stage's clock, if that
        is known.
        """


class Completed(NamedTuple):
    """A transfer that was waited for. at: when it was complete, however late that was noticed; None
    if nobody watched it."""

    buffer: torch.Tensor
    at: float | None


class LedgerError(Exception):
    """A stage broke the rules of the ledger: a fault in Headrace, never the user's."""


@dataclass(frozen=True)
class _Entry:
    handle: Handle
    buffer: torch.Tensor


class Ledger:
    """Owns handles and buffers from start to wait; each is waited for exactly once."""

    def __init__(self) -> None:
        self._open: dict[Channel, dict[int, _Entry]] = {}
        self._newest: dict[Channel, int] = {}

    def open(self, channel: Channel, step: int, handle: Handle, buffer: torch.Tensor) -> None:
        """Take charge of a started transfer. LedgerError unless steps ascend on the channel."""
        newest = self._newest.get(channel, -1)
        if step <= newest:
            raise LedgerError(f"{_name(channel, step)} opened twice or late: newest is {newest}")
        self._newest[channel] = step
        self._open.setdefault(channel, {})[step] = _Entry(handle, buffer)

    def wait(self, channel: Channel, step: int, timeout_s: float) -> Completed:
        """Wait for a transfer and give up its buffer. LedgerError if it is not open."""
        entry = self._open.get(channel, {}).pop(step, None)
        if entry is None:
            if step <= self._newest.get(channel, -1):
                raise LedgerError(f"{_name(channel, step)} waited for twice, or never started")
            raise LedgerError(f"{_name(channel, step)} was never started")
        return Completed(entry.buffer, entry.handle.wait(timeout_s))

    def handle(self, channel: Channel, step: int) -> Handle | None:
        """A transfer's handle, to see how it is; None if it is not open."""
        entry = self._open.get(channel, {}).get(step)
        return None if entry is None else entry.handle

    def open_transfers(self) -> Iterator[tuple[Channel, int]]:
        """All transfers not waited for yet, each channel's in step order."""
        for channel, entries in self._open.items():
            for step in entries:
                yield channel, step


def _name(channel: Channel, step: int) -> str:
    return f"{channel.tensors} {channel.source}->{channel.target} of step {step}"
