"""Shards of a stage that compute a step together, in virtual time: all begin when all are there.

In earnest they add up many times in a step, in memory that they share. Here they meet once, where
each begins to compute.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from headrace.execution.executor import PlanOrderError
from headrace.pipeline.links import LinkError
from headrace.simulation.virtual_links import VirtualClock


@dataclass(frozen=True)
class _Arrival:
    """One that waits. begin, fail: called once, the one or the other."""

    step: int
    begin: Callable[[], None]
    fail: Callable[[LinkError], None]


@dataclass
class VirtualShards:
    """Those of one stage. ranks: theirs."""

    clock: VirtualClock
    ranks: range
    _waiting: dict[int, _Arrival] = field(default_factory=dict)
    _lost: int | None = None

    def arrive(
        self,
        rank: int,
        step: int,
        timeout_s: float,
        begin: Callable[[], None],
        fail: Callable[[LinkError], None],
    ) -> bool:
        """Whether all are there, so that this one may begin; else it is told.

        Raises LinkError if one is gone, PlanOrderError if another computes another step.
        """
        if self._lost is not None:
            raise _gone(self._lost)
        others = {arrival.step for arrival in self._waiting.values()}
        if others - {step}:
            raise PlanOrderError(f"rank {rank} computes step {step}, its other shards {others}")
        if len(self._waiting) == len(self.ranks) - 1:
            for arrival in self._waiting.values():
                self.clock.schedule(0.0, arrival.begin)
            self._waiting.clear()
            return True
        arrival = self._waiting[rank] = _Arrival(step, begin, fail)
        self.clock.schedule(timeout_s, lambda: self._give_up(rank, arrival))
        return False

    def lose(self, rank: int) -> None:
        """One is gone: nobody computes any more."""
        if rank not in self.ranks or self._lost is not None:
            return
        self._lost = rank
        for other, arrival in self._waiting.items():
            if other != rank:
                self.clock.schedule(0.0, partial(arrival.fail, _gone(rank)))
        self._waiting.clear()

    def _give_up(self, rank: int, arrival: _Arrival) -> None:
        if self._waiting.get(rank) is arrival:
            (late, *_) = set(self.ranks) - self._waiting.keys()
            arrival.fail(LinkError(f"rank {late} did not compute step {arrival.step}", late))


def _gone(rank: int) -> LinkError:
    return LinkError(f"adding up with rank {rank}: it is gone", rank)
