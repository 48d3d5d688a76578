"""Decoding sequences in groups that take turns, spread so that each step costs the same."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from headrace.engine.request import Sequence
from headrace.engine.step_cost import StepCost, StepWork, total_work


@dataclass
class _Group:
    """context: positions that its sequences' next rows attend to, summed."""

    sequences: list[Sequence] = field(default_factory=list)
    context: int = 0


class Microbatches:
    """Which group each decoding sequence belongs to, and whose turn it is.

    With as many groups as stages, a row's token is back when its group's turn comes again.
    """

    def __init__(self, count: int) -> None:
        self._groups = [_Group() for _ in range(count)]
        self._turn = 0
        self._decoding = 0

    @property
    def decoding(self) -> int:
        """Sequences in all groups; any thread may ask."""
        return self._decoding

    def all(self) -> Iterator[Sequence]:
        """Every sequence in a group."""
        return chain.from_iterable(group.sequences for group in self._groups)

    @property
    def count(self) -> int:
        """Groups, empty ones included."""
        return len(self._groups)

    def members(self, group: int) -> list[Sequence]:
        """The group's sequences; not to be changed."""
        return self._groups[group].sequences

    def put_first(self, group: int, postponed: list[Sequence]) -> None:
        """Let those of a group's sequences that had no row in its step be the first in its next."""
        late = {
            id(sequence): sequence for sequence in postponed if sequence.running.microbatch == group
        }
        members = self._groups[group].sequences
        members[:] = [*late.values(), *(one for one in members if id(one) not in late)]

    def work(self, group: int) -> StepWork:
        """What a step with one row of each of the group's sequences carries."""
        rows = len(self._groups[group].sequences)
        return StepWork(tokens=rows, attended=self._groups[group].context, sampled=rows)

    @property
    def decode_work(self) -> StepWork:
        """What a step with a row of every decoding sequence would carry."""
        return total_work(map(self.work, range(self.count)))

    def turns(self) -> list[int]:
        """The groups in the order in which their turns come, the next one first."""
        count = len(self._groups)
        return [(self._turn + offset) % count for offset in range(count)]

    def planned(self, group: int, rows: int) -> None:
        """A step of this group was planned, with so many rows of its sequences."""
        self._groups[group].context += rows
        self._turn = (group + 1) % len(self._groups)

    def resize(self, count: int) -> None:
        """Spread the sequences evenly over so many groups; most stay where they are."""
        everyone = self._decoding
        room = [everyone // count + (n < everyone % count) for n in range(count)]
        moving = []
        for number, group in enumerate(self._groups):
            kept = room[number] if number < count else 0
            moving += group.sequences[kept:]
        for sequence in moving:
            self.leave(sequence)
        del self._groups[count:]
        self._groups += [_Group() for _ in range(count - len(self._groups))]
        for sequence in moving:
            sizes = [
                len(group.sequences) - size for group, size in zip(self._groups, room, strict=True)
            ]
            self._add(sequence, sizes.index(min(sizes)))

    def join(self, sequence: Sequence, current: int) -> None:
        """Take in a sequence that is prefilled: into the step's own group unless another has less
        to do."""
        sizes = [len(group.sequences) for group in self._groups]
        smallest = min(sizes)
        if sizes[current] > smallest:
            level = [n for n, size in enumerate(sizes) if size == smallest]
            current = min(level, key=lambda n: self._groups[n].context)
        self._add(sequence, current)

    def leave(self, sequence: Sequence) -> None:
        """Take out a sequence that ended or is preempted."""
        run = sequence.running
        assert run.microbatch is not None
        group = self._groups[run.microbatch]
        group.sequences.remove(sequence)
        group.context -= run.planned_positions + 1
        self._decoding -= 1
        run.microbatch = None

    def even_out(self, cost: StepCost) -> None:
        """Move one sequence if endings or growth left two groups' steps uneven.

        References keep its token right, but a moved row comes early, so it skips a turn.
        """
        if len(self._groups) < 2:
            return
        loads = [cost.added(self.work(n)) for n in range(len(self._groups))]
        dearest, cheapest = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[dearest] - loads[cheapest]
        members = self._groups[dearest].sequences
        # Moving a row of cost c turns a gap g into |g - 2c|; worth it if that halves the gap.
        if not members or gap < 1.5 * self._row_cost(cost, members[-1]):
            return
        best = min(members, key=lambda s: abs(gap - 2 * self._row_cost(cost, s)))
        if abs(gap - 2 * self._row_cost(cost, best)) <= gap / 2:
            self.leave(best)
            self._add(best, cheapest)

    def _row_cost(self, cost: StepCost, sequence: Sequence) -> float:
        attended = sequence.running.planned_positions + 1
        return cost.per_token + cost.per_sampled + cost.per_position * attended

    def _add(self, sequence: Sequence, group: int) -> None:
        run = sequence.running
        run.microbatch = group
        self._groups[group].sequences.append(sequence)
        self._groups[group].context += run.planned_positions + 1
        self._decoding += 1
