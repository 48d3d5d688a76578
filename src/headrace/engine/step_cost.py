"""What a step costs a stage in seconds: a linear model, fitted from measured steps."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class StepWork(NamedTuple):
    """What a step carries.

    tokens: input tokens. attended: positions that they attend to, added up (a token at position p
    attends to p + 1). sampled: rows of the last stage's output projection, one for each token that
    is sampled, and one for each prompt token whose log-probabilities are reported.
    """

    tokens: int
    attended: int
    sampled: int


NO_WORK = StepWork(0, 0, 0)


def chunk_attended(start: int, count: int) -> int:
    """Attended positions of `count` tokens of a sequence, the first at position `start`."""
    return count * start + count * (count + 1) // 2


def total_work(parts: Iterable[StepWork]) -> StepWork:
    """The work of several parts together."""
    tokens = attended = sampled = 0
    for part in parts:
        tokens += part.tokens
        attended += part.attended
        sampled += part.sampled
    return StepWork(tokens, attended, sampled)


@dataclass(frozen=True)
class StepCost:
    """A stage's cost of a step, in seconds: a fixed part (reading the weights, launching), one that
    grows until all experts are read, and one for each unit of work. No coefficient is negative.

    experts: reading the weights of all experts, of a stage that has some. missed: the part of them
    that one token does not pass. Tokens are taken to be routed independently, so that n of them
    miss missed ** n of the experts, whose weights are not read.
    """

    fixed: float
    per_token: float
    per_position: float
    per_sampled: float
    experts: float = 0.0
    missed: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Time of a step with this work; a step without tokens computes nothing."""
        return self.reading(work.tokens) + self.added(work) if work.tokens else 0.0

    def reading(self, tokens: float) -> float:
        """The part of a step of so many tokens that is not theirs one by one."""
        return self.fixed + self.experts * self.hit(tokens) if self.experts else self.fixed

    def hit(self, tokens: float) -> float:
        """The part of the experts that some of so many tokens pass."""
        missed: float = self.missed**tokens
        return 1 - missed

    def added(self, work: StepWork) -> float:
        """Time that this work adds to a step that runs anyway, reading what it reads anyway."""
        return (
            self.per_token * work.tokens
            + self.per_position * work.attended
            + self.per_sampled * work.sampled
        )


def dearest(costs: Iterable[StepCost], work: StepWork) -> StepCost:
    """The stage's cost at whose pace the pipeline runs steps with such work."""
    return max(costs, key=lambda cost: cost.seconds(work))


# Proportions of a small model on a CPU, until steps are measured: reading the weights takes as long
# as some 30 tokens' arithmetic, a token's attention over 1,000 positions a quarter of that token's
# products, sampling as much as a token.
PRIOR = StepCost(fixed=3e-3, per_token=1e-4, per_position=2.5e-8, per_sampled=1e-4)
# Of that model, SmolLM2-135M: bytes read in a step, products of elements for a token in its layers.
_PRIOR_BYTES, _PRIOR_PRODUCTS = 269e6, 106e6


def prior_cost(
    weight_bytes: int, products: int, expert_bytes: int = 0, missed: float = 0.0
) -> StepCost:
    """The prior of a stage of this size, for no stage less than PRIOR.

    weight_bytes: of all its weights. products: of elements, for a token in its layers.
    expert_bytes: of those weights that are experts'. missed: as of StepCost.
    """
    read = max(1.0, (weight_bytes - expert_bytes) / _PRIOR_BYTES)
    work = max(read, products / _PRIOR_PRODUCTS)
    return StepCost(
        fixed=read * PRIOR.fixed,
        per_token=work * PRIOR.per_token,
        per_position=work * PRIOR.per_position,
        per_sampled=work * PRIOR.per_sampled,
        experts=PRIOR.fixed * expert_bytes / _PRIOR_BYTES,
        missed=missed,
    )


# Steps of similar size remembered.
_MEMORY = 100
# How much the prior weighs against one measured step.
_PRIOR_WEIGHT = 0.0003
_SOLVE_EVERY = 32
# Steps of a new size that are believed, and after each of which the fit is solved at once.
_NEWS = 4
# Work up to so many times the most that was measured is foretold, more is guessed.
_REACH = 2
# How far one step moves the machine's speed and the typical error, and that error's least.
_SPEED_STEP = 0.02
_ERROR_STEP = 0.05
_LEAST_ERROR = 0.01


class CostFit:
    """Fits one stage's StepCost from its measured steps, some ten microseconds a step.

    Least squares of the relative error, without negative coefficients. Steps are remembered by
    size (tokens, in powers of two): each size forgets only when steps of that size come, so a long
    time of decoding does not wipe out what prefill costs. Steps far off the prediction, as happens
    on a shared machine, count less (Huber 1964). If steps of whatever kind take longer than they
    used to, that is followed within some ten steps, apart from the fit, as the machine's slowness.
    What the steps do not tell apart, such as tokens and samples while all rows decode, keeps the
    prior's proportions.
    """

    def __init__(self, prior: StepCost = PRIOR) -> None:
        self._prior = prior
        # Of a step's seconds; the last is experts', where there are any.
        self._parts = 5 if prior.experts else 4
        self._pairs = tuple(itertools.combinations_with_replacement(range(self._parts), 2))
        # All choices of parts to hold at zero, but not all of them.
        choices = itertools.product((False, True), repeat=self._parts)
        self._held = np.array(list(choices)[:-1])
        # Of each part, in multiples of the prior, at a slowness of 1.
        self._multiples = [1.0] * self._parts
        self._slowness = 1.0
        self._sizes: dict[int, list[float]] = {}
        self._steps_of_size: dict[int, int] = {}
        self._steps = 0
        self._largest = NO_WORK
        self._unsolved = 0
        # The median of the relative error so far, followed step by step, as is the slowness.
        self._typical_error = 0.1

    def add(self, work: StepWork, seconds: float) -> None:
        """Take in a measured step; one without tokens or time tells nothing."""
        if work.tokens == 0 or seconds <= 0:
            return
        self._steps += 1
        self._largest = StepWork(*map(max, self._largest, work))
        self._unsolved += 1
        size = work.tokens.bit_length()
        count = self._steps_of_size.get(size, 0) + 1
        self._steps_of_size[size] = count
        if self._steps <= _SOLVE_EVERY:
            weight = 1 / seconds**2
        elif count <= _NEWS:
            # What the fit says about a size it has not seen does not make a measurement wrong.
            seconds /= self._slowness
            weight = 1 / seconds**2
            self._unsolved = _SOLVE_EVERY
        else:
            weight, seconds = self._judge(work, seconds)
        prior = self._prior
        x = [
            prior.fixed,
            prior.per_token * work.tokens,
            prior.per_position * work.attended,
            prior.per_sampled * work.sampled,
        ]
        if prior.experts:
            x.append(prior.experts * prior.hit(work.tokens))
        terms = [weight * x[i] * x[j] for i, j in self._pairs]
        terms += [weight * seconds * part for part in x]
        keep = 1 - 1 / _MEMORY
        old = self._sizes.get(size)
        self._sizes[size] = (
            terms if old is None else [keep * a + b for a, b in zip(old, terms, strict=True)]
        )

    def measured(self, work: StepWork) -> bool:
        """Whether steps of the kind and about the size of this one were measured."""
        return all(own <= _REACH * most for own, most in zip(work, self._largest, strict=True))

    def _judge(self, work: StepWork, seconds: float) -> tuple[float, float]:
        """The step's weight in the sums, and its seconds at a slowness of 1."""
        predicted = self.cost.seconds(work)
        if not predicted:
            # The steps so far put all their time down to something that this one has none of.
            return (self._slowness / seconds) ** 2, seconds / self._slowness
        error = abs(seconds - predicted) / min(seconds, predicted)
        slowness, typical = self._slowness, self._typical_error
        self._slowness *= 1 + (_SPEED_STEP if seconds > predicted else -_SPEED_STEP)
        typical *= 1 + (_ERROR_STEP if error > typical else -_ERROR_STEP)
        self._typical_error = max(typical, _LEAST_ERROR)
        trust = min(1.0, 2 * self._typical_error / error) if error else 1.0
        # Measured times predicted: neither a slow nor a fast outlier pulls harder than the other.
        return trust * slowness**2 / (seconds * predicted), seconds / slowness

    @property
    def cost(self) -> StepCost:
        """The fit so far; the prior before the first step."""
        if self._unsolved and (self._unsolved >= _SOLVE_EVERY or self._steps <= _SOLVE_EVERY):
            self._multiples = self._solve()
            self._unsolved = 0
        prior = self._prior
        fixed, token, position, sampled, *experts = (self._slowness * m for m in self._multiples)
        return StepCost(
            fixed=fixed * prior.fixed,
            per_token=token * prior.per_token,
            per_position=position * prior.per_position,
            per_sampled=sampled * prior.per_sampled,
            experts=experts[0] * prior.experts if experts else 0.0,
            missed=prior.missed,
        )

    def _solve(self) -> list[float]:
        sums = np.sum(list(self._sizes.values()), axis=0)
        parts = self._parts
        products = np.zeros((parts, parts))
        products[np.triu_indices(parts)] = sums[:-parts]
        products = np.triu(products) + np.triu(products, 1).T
        targets = sums[-parts:]
        # The prior's proportions at the measured size: the best multiple of the prior.
        multiple = targets.sum() / products.sum()
        doubt = _PRIOR_WEIGHT / multiple**2
        products += doubt * np.eye(parts)
        targets = targets + doubt * multiple
        # Exact non-negative least squares: the best of all solutions with some parts held at zero.
        held = self._held
        systems = np.where(held[:, :, None] | held[:, None, :], 0.0, products)
        systems[:, range(parts), range(parts)] += held
        solutions = np.linalg.solve(systems, np.where(held, 0.0, targets)[:, :, None])[:, :, 0]
        loss = np.einsum("ni,ij,nj->n", solutions, products, solutions) - 2 * solutions @ targets
        loss[(solutions < 0).any(axis=1)] = np.inf
        found: list[float] = solutions[np.argmin(loss)].tolist()
        return found
