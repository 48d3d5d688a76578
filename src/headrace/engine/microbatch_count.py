"""How many groups of sequences should take turns: the formula, and when to act on it."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from headrace.engine.step_cost import StepCost, StepWork

# Beyond it nothing is gained: a group of one row costs its fixed part, and plans cost the engine.
MOST_MICROBATCHES = 64
# Throughput that is given up for fewer groups: they mean fewer steps, and tokens found sooner.
_TOLERANCE = 0.02
# Looks in a row, one a round of turns, that must want another number before it is changed.
_LOOKS = 2


def window_of(num_microbatches: int, num_stages: int) -> int:
    """Steps planned beyond the newest result: each group's next, and two to hide the way of plans
    and results."""
    return max(num_microbatches, num_stages) + 2


def round_seconds(count: int, work: StepWork, costs: Items[StepCost], link_s: float) -> float:
    """Seconds until `count` groups that share `work` have each had a step, at a steady pace.

    docs/overlap.md has the formula, R / max(m t(R/m), pp (t(R/m) + L)) tokens a second: the slowest
    stage runs every group's step, or one group's step goes through all stages and links. Rows do
    not split evenly: the largest group makes the way through.
    """
    rows = work.tokens
    largest = -(-rows // count) / rows
    stage_s = max(cost.fixed * count + cost.added(work) for cost in costs)
    way_s = sum(cost.fixed + cost.added(work) * largest for cost in costs) + len(costs) * link_s
    return max(stage_s, way_s)


def best_count(work: StepWork, costs: Items[StepCost], link_s: float, most: int) -> int:
    """The fewest groups with which `work`, a row of every running sequence, is done as fast as with
    any number up to `most` (within two percent)."""
    counts = range(1, min(most, work.tokens) + 1)
    seconds = [round_seconds(count, work, costs, link_s) for count in counts]
    enough = min(seconds) * (1 + _TOLERANCE)
    return next(count for count, s in zip(counts, seconds, strict=True) if s <= enough)


@dataclass
class MicrobatchTuner:
    """Says when to change the number of groups. Asked once a round of turns."""

    most: int
    _wanted: list[int] = field(default_factory=list, init=False)

    def next_count(
        self, current: int, work: StepWork, costs: Items[StepCost], link_s: float
    ) -> int:
        """How many groups there should be from now on; `current` unless others were best for a
        while."""
        best = best_count(work, costs, link_s, self.most)
        if best == current:
            self._wanted.clear()
            return current
        if self._wanted and (self._wanted[-1] > current) != (best > current):
            self._wanted.clear()
        self._wanted.append(best)
        if len(self._wanted) < _LOOKS:
            return current
        # Of those wanted the one that moves least: one odd measurement moves nothing far.
        chosen = min(self._wanted, key=lambda count: abs(count - current))
        self._wanted.clear()
        return chosen
