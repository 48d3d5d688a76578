"""Whose prefill goes first when a step cannot carry everybody's."""

import heapq
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from headrace.engine.request import Sequence
from headrace.engine.waiting import WaitingQueue, by_need


class PrefillOrder(Protocol):
    """Decides in which order sequences are offered what a step may take; asked once a plan.

    begun: sequences whose prefill has begun, by rank. admissible: how many waiting ones may be
    looked at; 0 if there is no slot for any.
    """

    def turns(
        self, begun: list[Sequence], waiting: WaitingQueue, admissible: int
    ) -> Iterable[Sequence]:
        """Those that may take part in the step, each once, the first one first."""

    def planned(self, chunks: Mapping[Sequence, int], postponed: Collection[Sequence]) -> None:
        """What came of it: each one's tokens in the step, and who waits for a beginning that the
        step computes for another one."""


class FirstCome:
    """Who has begun goes on, then whoever came first: the order that vLLM has."""

    def turns(
        self, begun: list[Sequence], waiting: WaitingQueue, admissible: int
    ) -> Iterable[Sequence]:
        """All that have begun, then those that wait, each by rank."""
        return [*begun, *waiting.first_by_rank(admissible)]

    def planned(self, chunks: Mapping[Sequence, int], postponed: Collection[Sequence]) -> None:
        """Nothing to remember."""


class ShortestFirst:
    """Who needs the least goes first, whether it has begun or not; but half is the oldest's.

    Shortest remaining time first brings the first tokens soonest on average (Schrage 1968) and,
    under enough short prompts, never lets a long one end. So the oldest, of the best priority, may
    always have as much as all others together: whatever the others had more since it became the
    oldest is owed to it, and while it is owed anything it goes first. Of the tokens prefilled from
    then on, at least half, less a step's, are its own, until it is done. Hence no prompt waits for
    more than twice the prefill that it would wait for first come, first served, and a step's for
    each that is before it, whatever else arrives.
    """

    def __init__(self) -> None:
        self._oldest: Sequence | None = None

    def turns(
        self, begun: list[Sequence], waiting: WaitingQueue, admissible: int
    ) -> Iterable[Sequence]:
        """By priority and what is left to prefill; the oldest before all if it is owed anything."""
        heads = [*begun[:1], *waiting.first_by_rank(min(admissible, 1))]
        oldest = self._oldest = min(heads, key=lambda s: s.rank, default=None)
        owed = oldest is not None and oldest.owed_prefill > 0
        if oldest is not None and owed:
            yield oldest
        for _, sequence in heapq.merge(
            sorted(((s.request.priority, s.running.prefill_left, s.arrival), s) for s in begun),
            ((by_need(s), s) for s in waiting.first_by_need(admissible)),
        ):
            if sequence is not oldest or not owed:
                yield sequence

    def planned(self, chunks: Mapping[Sequence, int], postponed: Collection[Sequence]) -> None:
        """Keep account of what the oldest is owed; what is computed for it and another is its
        own."""
        oldest = self._oldest
        if oldest is None or oldest in postponed:
            return
        own = chunks.get(oldest, 0)
        others = sum(chunks.values()) - own
        oldest.owed_prefill = max(0, oldest.owed_prefill + others - own)
