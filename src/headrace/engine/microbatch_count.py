"""How many groups of sequences should take turns: the formula, and when to act on it."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from headrace.engine.step_cost import StepCost, StepWork

# Beyond it nothing is gained: a group of one row costs its fixed part, and plans cost the engine.
MOST_MICROBATCHES = 64
# Throughput given up for fewer groups, which mean fewer steps and stops found sooner; and for
# leaving the number as it is, unless so many times fewer do: the next measurement might undo it.
_FEWER_TOLERANCE = 0.02
_STAY_TOLERANCE = 0.035
_CLEARLY_FEWER = 1.5
# Looks in a row, one a round of turns, that must want another number before it is changed.
_LOOKS = 2
# The fit cannot tell a step's fixed part from its rows' unless it saw decode steps of sizes that
# differ so many times, not longer ago than so many steps.
_TELLING = 1.5
_REMEMBERED_STEPS = 5000
# Looks after which a trial ends in any case; steps of the old size are in flight when it begins.
_TRIAL_LOOKS = 8


def steps_in_a_round(num_microbatches: int, num_stages: int) -> int:
    """Steps from one of a microbatch to its next, if no stage is to wait for a token."""
    return max(num_microbatches, num_stages)


def window_of(num_microbatches: int, num_stages: int) -> int:
    """Steps planned beyond the newest result: each group's next, and two to hide the way of plans
    and results."""
    return steps_in_a_round(num_microbatches, num_stages) + 2


def round_seconds(count: int, work: StepWork, costs: Items[StepCost], link_s: float) -> float:
    """Seconds until `count` groups that share `work` have each had a step, at a steady pace.

    docs/overlap.md has the formula, R / max(m t(R/m), pp (t(R/m) + L)) tokens a second: the slowest
    stage runs every group's step, or one group's step goes through all stages and links. Rows do
    not split evenly: the largest group makes the way through.
    """
    rows = work.tokens
    largest = -(-rows // count) / rows
    stage_s = max(cost.reading(rows / count) * count + cost.added(work) for cost in costs)
    way_s = sum(cost.reading(rows * largest) + cost.added(work) * largest for cost in costs)
    return max(stage_s, way_s + len(costs) * link_s)


def best_count(work: StepWork, costs: Items[StepCost], link_s: float, most: int) -> int:
    """The fewest groups with which `work`, a row of every running sequence, is done as fast as with
    any number up to `most` (within two percent)."""
    return _fewest(_all_rounds(work, costs, link_s, most))


def _all_rounds(work: StepWork, costs: Items[StepCost], link_s: float, most: int) -> list[float]:
    """round_seconds() of 1, 2 and so on groups, none of them empty."""
    counts = range(1, min(most, work.tokens) + 1)
    return [round_seconds(count, work, costs, link_s) for count in counts]


def _fewest(rounds: list[float]) -> int:
    enough = min(rounds) * (1 + _FEWER_TOLERANCE)
    return next(count for count, seconds in enumerate(rounds, start=1) if seconds <= enough)


@dataclass
class MicrobatchTuner:
    """Says when to change the number of groups. Asked once a round of turns.

    Where all decode steps so far were about the same size, it tries another number until a step of
    another size was measured, so that the fitted costs tell something about it.
    """

    most: int
    _wanted: list[int] = field(default_factory=list, init=False)
    _trying: int = field(default=0, init=False)
    # Of the steps measured, the newest with so many rows, each of which passed the output
    # projection: of decode.
    _seen: dict[int, int] = field(default_factory=dict, init=False)
    _measured: int = field(default=0, init=False)
    # Whether there was such a step since the last trial: without one another would tell nothing.
    _may_try: bool = field(default=False, init=False)

    def see(self, work: StepWork) -> None:
        """A step was measured."""
        self._measured += 1
        if work.tokens and work.tokens == work.sampled:
            self._seen[work.tokens] = self._measured
            self._may_try = True

    def next_count(
        self, current: int, work: StepWork, costs: Items[StepCost], link_s: float
    ) -> int:
        """How many groups there should be from now on; `current` unless others were best for a
        while."""
        if self._trying:
            self._trying -= 1
            if self._trying and self._ignorant:
                return current
            self._trying = 0
            return best_count(work, costs, link_s, self.most)
        if self._ignorant and self._may_try and work.tokens > 1 and self.most > 1:
            self._trying, self._may_try = _TRIAL_LOOKS, False
            self._wanted.clear()
            return current // 2 if current > 1 else 2
        rounds = _all_rounds(work, costs, link_s, self.most)
        best = _fewest(rounds)
        stays = rounds[min(current, len(rounds)) - 1] <= min(rounds) * (1 + _STAY_TOLERANCE)
        if best == current or (stays and current < best * _CLEARLY_FEWER):
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

    @property
    def _ignorant(self) -> bool:
        """Whether what decode steps of other sizes cost is a guess."""
        old = self._measured - _REMEMBERED_STEPS
        for rows in [rows for rows, step in self._seen.items() if step < old]:
            del self._seen[rows]
        return bool(self._seen) and max(self._seen) < _TELLING * min(self._seen)
