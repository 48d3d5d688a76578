"""Which request ends a stage whenever it runs: those that may be it run apart, one at a time.

When a stage dies, whatever it was computing may be why. An innocent request gets past that point
when it is computed again; one that is to blame does not. While suspects run apart nothing else is
computed, so at the second death there is one request that it can be.

Each death weighs on what was computed. One of the stage's own doing (an exception, a segmentation
fault, a step that never ends) weighs so much that its suspects run apart at once, and the second
one tells. A process that was killed or stopped by somebody else says little about the request: two
such deaths in a row, at the same point, have it run apart, and two more there tell. Each of the two
kinds tells by itself alone: somebody may well kill a process twice after a fault of its own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from headrace.engine.request import Sequence

_OWN, _OUTSIDE = 2, 1
_APART = 2
_OWN_BLAMED, _OUTSIDE_BLAMED = 2, 4


@dataclass
class _Mark:
    """own, outside: deaths at this point. outputs: by completion that goes on, how many tokens it
    had or was about to have then; with one more it is past the point."""

    own: int = 0
    outside: int = 0
    outputs: dict[int, int] = field(default_factory=dict)

    @property
    def weight(self) -> int:
        """Of all deaths."""
        return _OWN * self.own + _OUTSIDE * self.outside

    @property
    def blamed(self) -> bool:
        """Whether the deaths tell, if nothing else was computed."""
        return self.own >= _OWN_BLAMED or self.outside >= _OUTSIDE_BLAMED


class Suspects:
    """Requests that a stage may have died of, until they are past the point where it did."""

    def __init__(self) -> None:
        self._marks: dict[int, _Mark] = {}

    def __bool__(self) -> bool:
        return bool(self._marks)

    @property
    def apart(self) -> int | None:
        """The request that is to run with no other beside it: the most suspicious one, if any is so
        suspicious."""
        number = max(self._marks, key=lambda n: self._marks[n].weight, default=None)
        return number if number is not None and self._marks[number].weight >= _APART else None

    def died(
        self,
        computed: Iterable[Sequence],
        going_on: Mapping[int, Iterable[Sequence]],
        *,
        outside: bool,
    ) -> int | None:
        """A stage died, and may have been computing rows of these: the request that is to blame, if
        that is certain.

        computed: those of completions that have ended, too: a stage computes ahead of an end.
        going_on: by request, its completions that have not ended. outside: the stage's process was
        ended by somebody else.
        """
        computed = [sequence for sequence in computed if sequence.request.id in going_on]
        requests = {sequence.request.id for sequence in computed}
        for number in requests:
            mark = self._marks.setdefault(number, _Mark())
            mark.outside += outside
            mark.own += not outside
        for sequence in computed:
            run, outputs_had = sequence.run, len(sequence.outputs)
            due = outputs_had + sequence.in_flight
            if run is not None:
                due = max(outputs_had, run.planned_positions - len(sequence.request.prompt))
            number = sequence.request.id
            self._suspect(number, going_on[number] if sequence.finished else [sequence], due)
        for number in requests:
            if not self._marks[number].outputs:
                # What ended lay behind all that go on.
                del self._marks[number]
        if len(requests) == 1:
            (only,) = requests
            if only in self._marks and self._marks[only].blamed:
                return only
        return None

    def got_on(self, sequence: Sequence) -> None:
        """A token of the sequence was accepted: it may be past the point."""
        point = self._point_of(sequence)
        if point is not None and len(sequence.outputs) > point:
            self._past(sequence)

    def ended(self, sequence: Sequence, going_on: Iterable[Sequence]) -> None:
        """The sequence ended. going_on: completions of its request that have not.

        An end before the point shows nothing: the others are to get past it, then.
        """
        point = self._point_of(sequence)
        if point is not None:
            self._suspect(sequence.request.id, going_on, point)
            self._past(sequence)

    def _point_of(self, sequence: Sequence) -> int | None:
        mark = self._marks.get(sequence.request.id)
        return None if mark is None else mark.outputs.get(sequence.index)

    def _suspect(self, number: int, sequences: Iterable[Sequence], point: int) -> None:
        """Have these get past so many tokens before the request is trusted again."""
        outputs = self._marks[number].outputs
        for sequence in sequences:
            if len(sequence.outputs) <= point:
                outputs[sequence.index] = max(point, outputs.get(sequence.index, 0))

    def _past(self, sequence: Sequence) -> None:
        outputs = self._marks[sequence.request.id].outputs
        del outputs[sequence.index]
        if not outputs:
            del self._marks[sequence.request.id]
