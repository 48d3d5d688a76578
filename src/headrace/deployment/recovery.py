"""What happens when the pipeline breaks: it is built anew, and the engine goes on where it was.

An engine is stepped through here by whoever runs it, the thread of AsyncLLM or the caller of LLM.
While the ranks start, step() returns every now and then like any other, so that new requests and
aborts are taken on meanwhile; they wait until the pipeline is there.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from headrace.engine.engine import Engine, Pipeline
from headrace.engine.outputs import OutputDelta
from headrace.errors import HeadraceError, PipelineError, StallError, StartError, UsageError
from headrace.protocol.fault import RankFault

_log = logging.getLogger(__name__)


class RecoveryStatus(msgspec.Struct, frozen=True, gc=False):
    """How an engine recovers, at one moment. restarts: all so far. seconds: of all recoveries that
    are over. cause: why it recovers now, None while all is well; since: on time.monotonic."""

    restarts: int = 0
    seconds: float = 0.0
    cause: str | None = None
    since: float = 0.0

    def seconds_at(self, now: float) -> float:
        """Those of the recovery that goes on included."""
        return self.seconds + (0.0 if self.cause is None else now - self.since)


class RestartablePipeline(Pipeline, Protocol):
    """A pipeline whose ranks can be started anew."""

    faults: list[RankFault]

    def stand_still(self, ranks: tuple[int, ...]) -> None:
        """Count these among those that have to be started anew."""


class Rebuilding(Protocol):
    """How the ranks are started anew."""

    def begin(self, epoch: int) -> None:
        """Begin the epoch of this number."""

    def look(self, timeout_s: float) -> bool:
        """Further the start; whether every rank is ready. Raises what makes it fail."""


@dataclass
class Recovery:
    """Steps an engine, and has its pipeline built anew when it breaks.

    max_restarts, window_s: so many in so many seconds, and no more. status: the newest, for any
    thread.
    """

    engine: Engine
    ranks: RestartablePipeline
    rebuild: Rebuilding
    max_restarts: int
    window_s: float
    clock: Callable[[], float] = time.monotonic
    status: RecoveryStatus = field(default_factory=RecoveryStatus, init=False)
    _restarted_at: deque[float] = field(default_factory=deque, init=False)

    @property
    def recovering(self) -> bool:
        """Whether the pipeline is being built anew."""
        return self.status.cause is not None

    @property
    def settled(self) -> bool:
        """Whether nothing is in flight, and every rank has reported on every step."""
        return not self.recovering and self.engine.settled

    def step(self, timeout_s: float = 1.0) -> list[OutputDelta]:
        """A step of the engine, or for so long of its recovery.

        Raises what broke the pipeline if it is not to be built anew, or not once more.
        """
        try:
            if not self.recovering:
                return self.engine.step(timeout_s)
            if self.rebuild.look(timeout_s):
                self._recovered()
            return []
        except HeadraceError as error:
            if isinstance(error, UsageError) or not self.max_restarts:
                raise
            return self._begin(error)

    def _begin(self, error: HeadraceError) -> list[OutputDelta]:
        """Have the pipeline built anew; what it brought before."""
        now = self.clock()
        while self._restarted_at and now - self._restarted_at[0] > self.window_s:
            self._restarted_at.popleft()
        if len(self._restarted_at) >= self.max_restarts:
            raise _given_up(error, self.max_restarts, self.window_s) from error
        self._restarted_at.append(now)
        if isinstance(error, StallError):
            self.ranks.stand_still(error.ranks)
        # Of a recovery that failed nothing was in flight.
        deltas = self.engine.lose(self.ranks.faults)
        epoch = self.engine.scheduler.epoch + 1
        self.engine.restart(self.ranks, epoch)
        old = self.status
        since = old.since if self.recovering else now
        self.status = RecoveryStatus(old.restarts + 1, old.seconds, str(error), since)
        _log.warning(
            "%s; restart %d of %d in %g s: %d requests go on when the stages are there",
            error,
            len(self._restarted_at),
            self.max_restarts,
            self.window_s,
            self.engine.num_requests,
        )
        for line in getattr(error, "__notes__", ()):
            _log.info(line)
        try:
            self.rebuild.begin(epoch)
        except HeadraceError as another:
            deltas += self._begin(another)
        return deltas

    def _recovered(self) -> None:
        old, now = self.status, self.clock()
        self.status = RecoveryStatus(old.restarts, old.seconds_at(now))
        _log.warning("the stages are there again after %.1f s", now - old.since)


def _given_up(error: HeadraceError, restarts: int, window_s: float) -> HeadraceError:
    kind = type(error) if isinstance(error, StartError) else PipelineError
    given_up = kind(
        f"{error}; gave up after {restarts} restarts in {window_s:g} s (--max-restarts)"
    )
    for line in getattr(error, "__notes__", ()):
        given_up.add_note(line)
    return given_up
