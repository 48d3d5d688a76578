"""How much prefill the step being planned may carry."""

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

from headrace.engine.step_cost import StepCost, StepWork, chunk_attended

PrefillPolicyName = Literal["budget", "even"]


@dataclass(frozen=True)
class Situation:
    """What a policy looks at when a step is planned.

    decode: work of the step's decode rows. mean_decode: decode work of a group, averaged over the
    groups. pending: work of all tokens to be prefilled that are in no plan yet, of running
    sequences and of waiting ones as far as there are slots and blocks for them (else those would
    call for large steps that nothing can fill). free_fraction: cache blocks that could be given out
    now, of all. cost: the dearest stage's. max_tokens: the most tokens a step may have, decode rows
    included. max_step_s: the most seconds that it may take; None for what the policy finds right.
    """

    decode: StepWork
    mean_decode: StepWork
    pending: StepWork
    num_microbatches: int
    free_fraction: float
    cost: StepCost
    max_tokens: int
    max_step_s: float | None = None


@dataclass
class StepAllowance:
    """What the step may still take: tokens, and seconds of the dearest stage.

    least: tokens that may be taken whatever they cost, so that prefill always goes on.
    """

    tokens: int
    seconds: float
    cost: StepCost
    least: int = 0

    def take(self, start: int, wanted: int, reported: bool = False) -> int:
        """How many of a sequence's next `wanted` tokens fit, the first at position `start`.

        They are deducted, and a sampled row if they are all. reported: each has log-probabilities,
        which costs a sampled row, too. 0: the step is full.
        """
        count = max(0, min(wanted, self.tokens))
        if self.seconds < 0:
            # Also of tokens that seem to cost nothing: they read experts, too.
            count = min(count, self.least)
        elif self._seconds(start, count, reported) > self.seconds:
            count = min(count, max(self._fitting(start, reported), self.least))
        self.tokens -= count
        self.seconds -= self._seconds(start, count, reported)
        if count == wanted and not reported:
            self.seconds -= self.cost.per_sampled
        self.least = max(0, self.least - count)
        return count

    def _seconds(self, start: int, count: int, reported: bool) -> float:
        return self.cost.added(
            StepWork(count, chunk_attended(start, count), count if reported else 0)
        )

    def _fitting(self, start: int, reported: bool) -> int:
        """The longest chunk within the seconds: the root of a quadratic, as each token of a chunk
        attends to one position more than the one before."""
        seconds = self.seconds
        curve = self.cost.per_position / 2
        slope = self.cost.per_token + self.cost.per_position * (start + 0.5)
        if reported:
            slope += self.cost.per_sampled
        return int(2 * seconds / (slope + math.sqrt(slope**2 + 4 * curve * seconds)))


# What a step takes at least if anything is pending and it has room.
_LEAST_TOKENS = 16


class PrefillPolicy(Protocol):
    """Sets each step's allowance; asked once a plan, in plan order."""

    def allow(self, situation: Situation) -> StepAllowance:
        """The allowance of the step being planned."""


def prefill_policy(name: PrefillPolicyName) -> PrefillPolicy:
    """The policy of that name, at its start."""
    return BudgetPolicy() if name == "budget" else EvenPolicy()


def _own_seconds(situation: Situation) -> float:
    """Of the step, before it takes any prefill: as a chunk's tokens soon pass all experts, a step
    that has one is taken to read as many as the longest."""
    cost = situation.cost
    return cost.reading(situation.max_tokens) + cost.added(situation.decode)


class BudgetPolicy:
    """Fills every step up to max_tokens: the chunked prefill that engines commonly have."""

    def allow(self, situation: Situation) -> StepAllowance:
        """max_tokens less the decode rows, whatever it costs unless there is a limit."""
        tokens = situation.max_tokens - situation.decode.tokens
        limit_s = math.inf if situation.max_step_s is None else situation.max_step_s
        own_s = _own_seconds(situation)
        return StepAllowance(tokens, limit_s - own_s, situation.cost, _LEAST_TOKENS)


# Within how many turns of all groups what is pending should be gone at the latest. More is more
# even, fewer bring first tokens sooner: with 6 the 99th percentile of their delay is about that of
# the best fixed budget, on two real stages and on four virtual ones.
_HORIZON_TURNS = 6
# Below this part of free cache, prefill is held back in proportion.
_AMPLE_CACHE = 0.2
# How many times what a step without prefill takes one with prefill may take. Why so many is told in
# docs/scheduling.md.
_MOST_TIMES_DECODE = 9


@dataclass
class EvenPolicy:
    """Keeps consecutive steps at one cost in seconds, for as long as what is pending allows.

    A pipeline stands still in proportion to how much the cost of its steps goes up and down, so the
    target stays where it is unless it must move: up, if what is pending would take more than
    `_HORIZON_TURNS` turns of all groups; down, if it would not last for one. That is the path of
    least variation between two bounds, each of which spreads the pending work over a number of
    steps as gLLM's token throttling does (arXiv 2504.14775), but in seconds, so that long contexts
    and uneven groups count. As there, little free cache holds prefill back. One group alone has no
    other to be even with.
    """

    _target_s: float = field(default=0.0, init=False)

    def allow(self, situation: Situation) -> StepAllowance:
        """What brings the step up to the target."""
        cost = situation.cost
        reading_s = cost.reading(situation.max_tokens)
        decode_s = reading_s + cost.added(situation.mean_decode)
        pending_s = cost.added(situation.pending)
        turn = situation.num_microbatches
        lowest = decode_s + pending_s / (_HORIZON_TURNS * turn if turn > 1 else 1)
        highest = decode_s + pending_s / turn
        self._target_s = min(max(self._target_s, lowest), highest)
        # A step that is mostly reading weights wastes it.
        target_s = min(max(self._target_s, 2 * reading_s), self._most_s(situation))
        throttle = min(1.0, situation.free_fraction / _AMPLE_CACHE)
        return StepAllowance(
            tokens=situation.max_tokens - situation.decode.tokens,
            seconds=(target_s - _own_seconds(situation)) * throttle,
            cost=cost,
            least=_LEAST_TOKENS,
        )

    def _most_s(self, situation: Situation) -> float:
        """The longest step that those who decode, and whoever comes next, should have to bear."""
        if situation.max_step_s is not None:
            return situation.max_step_s
        cost, row = situation.cost, StepWork(1, 1, 1)
        return _MOST_TIMES_DECODE * max(cost.seconds(situation.mean_decode), cost.seconds(row))
