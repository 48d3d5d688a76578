"""Sequences that wait for a slot: by priority, then first come, first served."""

from bisect import bisect_left, insort

from headrace.engine.request import Sequence
from headrace.engine.step_cost import NO_WORK, StepWork, chunk_attended, total_work


class WaitingQueue:
    """Ordered by rank. work: what it would take to prefill all of them."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.work = NO_WORK

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, place: int) -> Sequence:
        return self._sequences[place]

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait, in its place in line."""
        insort(self._sequences, sequence, key=by_rank)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, whose tokens are the same as when it was pushed."""
        place = bisect_left(self._sequences, sequence.rank, key=by_rank)
        assert self._sequences[place] is sequence
        del self._sequences[place]
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, sign: int) -> None:
        length = sequence.length
        own = StepWork(sign * length, sign * chunk_attended(0, length), sign)
        self.work = total_work([self.work, own])


def by_rank(sequence: Sequence) -> tuple[int, int]:
    """Sorts sequences into the order in which they run."""
    return sequence.rank
