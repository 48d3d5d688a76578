"""What a step costs a stage in seconds: a linear model, fitted from measured steps."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
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
    """A stage's cost of a step, in seconds: a fixed part (reading the weights, launching) and one
    for each unit of work. No coefficient is negative."""

    fixed: float
    per_token: float
    per_position: float
    per_sampled: float

    def seconds(self, work: StepWork) -> float:
        """Time of a step with this work; a step without tokens computes nothing."""
        return self.fixed + self.added(work) if work.tokens else 0.0

    def added(self, work: StepWork) -> float:
        """Time that this work adds to a step that runs anyway."""
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


def prior_cost(weight_bytes: int, products: int) -> StepCost:
    """The prior of a stage of this size, for no stage less than PRIOR.

    weight_bytes: of all its weights. products: of elements, for a token in its layers.
    """
    scale = max(1.0, weight_bytes / _PRIOR_BYTES, products / _PRIOR_PRODUCTS)
    return StepCost(*(scale * part for part in astuple(PRIOR)))


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
_PARTS = 4
_SUBSETS = np.array([[(n >> i) & 1 for i in range(_PARTS)] for n in range(1, 2**_PARTS)], bool)


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
        self._prior = (prior.fixed, prior.per_token, prior.per_position, prior.per_sampled)
        # In multiples of the prior, at a slowness of 1.
        self._multiples = (1.0,) * _PARTS
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
        fixed, per_token, per_position, per_sampled = self._prior
        x0, x1 = fixed, per_token * work.tokens
        x2, x3 = per_position * work.attended, per_sampled * work.sampled
        w0, w1, w2, w3, wy = weight * x0, weight * x1, weight * x2, weight * x3, weight * seconds
        terms = (
            w0 * x0, w0 * x1, w0 * x2, w0 * x3, w1 * x1, w1 * x2, w1 * x3, w2 * x2, w2 * x3,
            w3 * x3, wy * x0, wy * x1, wy * x2, wy * x3,
        )  # fmt: skip
        keep = 1 - 1 / _MEMORY
        old = self._sizes.get(size)
        self._sizes[size] = (
            list(terms) if old is None else [keep * a + b for a, b in zip(old, terms, strict=True)]
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
        scale = self._slowness
        return StepCost(*(scale * m * p for m, p in zip(self._multiples, self._prior, strict=True)))

    def _solve(self) -> tuple[float, ...]:
        sums = np.sum(list(self._sizes.values()), axis=0)
        products = np.zeros((_PARTS, _PARTS))
        products[np.triu_indices(_PARTS)] = sums[:10]
        products = np.triu(products) + np.triu(products, 1).T
        targets = sums[10:]
        # The prior's proportions at the measured size: the best multiple of the prior.
        multiple = targets.sum() / products.sum()
        doubt = _PRIOR_WEIGHT / multiple**2
        products += doubt * np.eye(_PARTS)
        targets = targets + doubt * multiple
        # Exact non-negative least squares: the best of all solutions with some parts held at zero.
        held = ~_SUBSETS
        systems = np.where(held[:, :, None] | held[:, None, :], 0.0, products)
        systems[:, range(_PARTS), range(_PARTS)] += held
        solutions = np.linalg.solve(systems, np.where(held, 0.0, targets)[:, :, None])[:, :, 0]
        loss = np.einsum("ni,ij,nj->n", solutions, products, solutions) - 2 * solutions @ targets
        loss[(solutions < 0).any(axis=1)] = np.inf
        return tuple(solutions[np.argmin(loss)].tolist())
