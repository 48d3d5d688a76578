"""Sequences that wait for a slot, in the two orders in which they may be taken."""

from bisect import bisect_left, insort
from collections.abc import Callable

from headrace.engine.request import Sequence
from headrace.engine.step_cost import NO_WORK, StepWork, chunk_attended, total_work


class WaitingQueue:
    """Ordered by rank, and by need. work: what it would take to prefill all of them."""

    def __init__(self) -> None:
        self._by_rank: list[Sequence] = []
        self._by_need: list[Sequence] = []
        self.work = NO_WORK

    def __len__(self) -> int:
        return len(self._by_rank)

    @property
    def oldest(self) -> Sequence | None:
        """The first by rank, if any waits."""
        return self._by_rank[0] if self._by_rank else None

    def first_by_rank(self, count: int) -> list[Sequence]:
        """At most so many, those first that run first in the order of arrival."""
        return self._by_rank[:count]

    def first_by_need(self, count: int) -> list[Sequence]:
        """At most so many, those first that need the least prefill."""
        return self._by_need[:count]

    def push(self, sequence: Sequence, prefill: int) -> None:
        """Let a sequence wait, in its place in line. prefill: tokens that it will probably need."""
        sequence.expected_prefill = prefill
        insort(self._by_rank, sequence, key=by_rank)
        insort(self._by_need, sequence, key=by_need)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, whose tokens are the same as when it was pushed."""
        _remove(self._by_rank, sequence, by_rank)
        _remove(self._by_need, sequence, by_need)
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, sign: int) -> None:
        length = sequence.length
        own = StepWork(sign * length, sign * chunk_attended(0, length), sign)
        self.work = total_work([self.work, own])


def by_rank(sequence: Sequence) -> tuple[int, int]:
    """Sorts sequences as they came, within a priority."""
    return sequence.rank


def by_need(sequence: Sequence) -> tuple[int, int, int]:
    """Sorts waiting sequences by the prefill that they need, within a priority."""
    return (sequence.request.priority, sequence.expected_prefill, sequence.arrival)


def _remove(
    ordered: list[Sequence], sequence: Sequence, key: Callable[[Sequence], tuple[int, ...]]
) -> None:
    place = bisect_left(ordered, key(sequence), key=key)
    assert ordered[place] is sequence
    del ordered[place]
