"""The mixed load: requests of very different lengths that arrive at random."""

import math
import random
from dataclasses import dataclass

from headrace.engine.step_cost import StepCost, StepWork


@dataclass(frozen=True)
class LoadRequest:
    """arrival_s counts from the start of the load; lengths are in tokens."""

    arrival_s: float
    prompt_length: int
    output_length: int


@dataclass(frozen=True)
class LoadShape:
    """Which lengths occur, ends included: prompts evenly on a logarithmic scale, outputs evenly."""

    shortest_prompt: int = 16
    longest_prompt: int = 4000
    shortest_output: int = 16
    longest_output: int = 500

    @property
    def max_positions(self) -> int:
        """Positions of the longest request."""
        return self.longest_prompt + self.longest_output

    def __str__(self) -> str:
        return (
            f"prompts {self.shortest_prompt} to {self.longest_prompt} tokens (log-uniform), "
            f"outputs {self.shortest_output} to {self.longest_output} (uniform), Poisson arrivals"
        )


def mixed_load(shape: LoadShape, count: int, rate: float, seed: int) -> list[LoadRequest]:
    """`count` requests in order of arrival, a Poisson process of `rate` requests a second."""
    numbers = random.Random(seed)
    log_low, log_high = math.log(shape.shortest_prompt), math.log(shape.longest_prompt)
    requests, now = [], 0.0
    for _ in range(count):
        now += numbers.expovariate(rate)
        prompt = round(math.exp(numbers.uniform(log_low, log_high)))
        output = numbers.randint(shape.shortest_output, shape.longest_output)
        requests.append(LoadRequest(now, prompt, output))
    return requests


def capacity(shape: LoadShape, cost: StepCost, rows: int) -> float:
    """Requests a second that a pipeline without bubbles serves if each step has `rows` decode rows.

    In the steady state a step ends rows / (mean output) requests, and so takes in as many prompts.
    """
    low, high = shape.shortest_prompt, shape.longest_prompt
    spread = math.log(high / low)
    prompt, prompt_squared = (high - low) / spread, (high**2 - low**2) / (2 * spread)
    output = (shape.shortest_output + shape.longest_output) / 2
    requests = rows / output
    work = StepWork(
        tokens=round(rows + requests * prompt),
        attended=round(rows * (prompt + output / 2) + requests * prompt_squared / 2),
        sampled=round(rows + requests),
    )
    return requests / cost.seconds(work)
