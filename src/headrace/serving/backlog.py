"""How much is held in memory for readers that have not taken it, over all connections."""

import logging
from collections.abc import Callable, Sequence

from headrace.engine.outputs import OutputDelta

_log = logging.getLogger(__name__)

# Several times the largest answer that a request may ask for.
MOST_HELD_BYTES = 512 * 2**20

# In CPython, a delta besides what follows, and a token's log-probability (two numbers, each with a
# place in a list).
_DELTA_BYTES = 250
_ENTRY_BYTES = 72


class Backlog:
    """Counts it, and cuts the largest when all together hold more than `most` bytes.

    on_cut: called for each that is cut.
    """

    def __init__(self, most: int, on_cut: Callable[[], None]) -> None:
        self._most = most
        self._on_cut = on_cut
        self._open: set[Held] = set()
        self.bytes = 0

    def open(self, cut: Callable[[], None]) -> "Held":
        """For a new answer. cut: called when it holds the most of all and there is no room left;
        nothing of it counts from then on."""
        held = Held(self, cut)
        self._open.add(held)
        return held

    def _add(self, held: "Held", size: int) -> None:
        if held not in self._open:
            return
        held.bytes += size
        self.bytes += size
        while self.bytes > self._most:
            largest = max(self._open, key=lambda held: held.bytes)
            _log.warning(
                "an answer was cut: its reader left %.1f MiB of it, and all answers together hold "
                "more than %.0f MiB",
                largest.bytes / 2**20,
                self._most / 2**20,
            )
            self._on_cut()
            self._close(largest)
            largest.cut()

    def _close(self, held: "Held") -> None:
        if held in self._open:
            self._open.remove(held)
            self.bytes -= held.bytes
            held.bytes = 0


class Held:
    """What is held for one answer, in bytes: deltas, what was made of them, and what its transport
    has not sent."""

    def __init__(self, backlog: Backlog, cut: Callable[[], None]) -> None:
        self.bytes = 0
        self.cut = cut
        self._backlog = backlog
        self._unsent = 0

    def add(self, size: int) -> None:
        """So much more is held, or less."""
        self._backlog._add(self, size)

    def unsent(self, size: int) -> None:
        """So much is in the transport now."""
        if size != self._unsent:
            change, self._unsent = size - self._unsent, size
            self.add(change)

    def close(self) -> None:
        """The answer is over; may be called again."""
        self._backlog._close(self)


def delta_bytes(deltas: Sequence[OutputDelta]) -> int:
    """What deltas take, besides what report_bytes and text_bytes count."""
    return _DELTA_BYTES * len(deltas)


def content_bytes(deltas: Sequence[OutputDelta]) -> int:
    """What the texts and log-probabilities of new tokens take."""
    size = 0
    for delta in deltas:
        size += len(delta.text)
        if delta.logprobs is not None:
            size += _ENTRY_BYTES * len(delta.logprobs.ids)
    return size


def report_bytes(deltas: Sequence[OutputDelta]) -> int:
    """What the reports on prompts take."""
    return sum(
        _ENTRY_BYTES * sum(len(entry.ids) for entry in delta.prompt_logprobs)
        for delta in deltas
        if delta.prompt_logprobs
    )
