"""What happens when the pipeline breaks: it is built anew, and the engine goes on where it was.

An engine is stepped through here by whoever runs it, the thread of AsyncLLM or the caller of LLM.
While the ranks start, step() returns every now and then like any other, so that new requests and
aborts are taken on meanwhile; they wait until the pipeline is there.
"""

import logging
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from headrace.deployment.restart_limit import RestartLimit
from headrace.engine.engine import Engine, Pipeline
from headrace.engine.outputs import OutputDelta
from headrace.errors import HeadraceError, StallError, UsageError
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

    limit: may have been used before, while they started for the first time. status: the newest, for
    any thread.
    """

    engine: Engine
    ranks: RestartablePipeline
    rebuild: Rebuilding
    limit: RestartLimit
    status: RecoveryStatus = field(init=False)

    def __post_init__(self) -> None:
        self.status = RecoveryStatus(self.limit.restarts)

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
            if isinstance(error, UsageError):
                raise
            return self._begin(error)

    def _begin(self, error: HeadraceError) -> list[OutputDelta]:
        """Have the pipeline built anew; what it brought before."""
        which = self.limit.count(error)
        if isinstance(error, StallError):
            self.ranks.stand_still(error.ranks)
        # Of a recovery that failed nothing was in flight.
        deltas = self.engine.lose(self.ranks.faults)
        epoch = self.engine.scheduler.epoch + 1
        self.engine.restart(self.ranks, epoch)
        old = self.status
        since = old.since if self.recovering else self.limit.clock()
        self.status = RecoveryStatus(self.limit.restarts, old.seconds, str(error), since)
        _log.warning(
            "%s; %s: %d requests go on when the stages are there",
            *(error, which, self.engine.num_requests),
        )
        for line in getattr(error, "__notes__", ()):
            _log.info(line)
        try:
            self.rebuild.begin(epoch)
        except HeadraceError as another:
            deltas += self._begin(another)
        return deltas

    def _recovered(self) -> None:
        old, now = self.status, self.limit.clock()
        self.status = RecoveryStatus(old.restarts, old.seconds_at(now))
        _log.warning("the stages are there again after %.1f s", now - old.since)
