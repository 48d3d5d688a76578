"""A pipeline that exists in virtual time only: stages that take as long as a cost model says.

Beside simulation/virtual_stages.py, which runs the real stage loops with tensors and encoded
messages: a replay has thousands of steps, and asks when each began on each stage.
"""

from collections import deque
from dataclasses import dataclass, field

from headrace.engine.step_cost import StepCost, StepWork
from headrace.protocol.plan import Plan, referenced_steps


@dataclass(frozen=True)
class StepTimes:
    """A step's virtual times, in seconds. began: on each stage. cost: its time on one stage."""

    step: int
    cost: float
    began: list[float]
    ended: float


@dataclass
class VirtualPipeline:
    """Stages that run every step in order, one at a time, for cost.seconds(work) each.

    A stage starts a step once it has finished the one before and the stage before has finished this
    one; the first stage also waits for the tokens that the plan refers to, which are there when the
    last stage has ended their step. Nothing takes time on the way.
    """

    num_stages: int
    cost: StepCost
    _free_at: list[float] = field(init=False)
    _sampled_at: dict[int, float] = field(default_factory=dict, init=False)
    _in_flight: deque[StepTimes] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        self._free_at = [0.0] * self.num_stages

    @property
    def next_result_at(self) -> float | None:
        """When the oldest step in flight ends, if there is one."""
        return self._in_flight[0].ended if self._in_flight else None

    def send(self, now: float, plan: Plan, work: StepWork) -> None:
        """Take in the next plan."""
        seconds = self.cost.seconds(work)
        ready = max([now, *(self._sampled_at[step] for step in referenced_steps(plan))])
        began = []
        for stage in range(self.num_stages):
            ready = max(ready, self._free_at[stage])
            began.append(ready)
            ready += seconds
            self._free_at[stage] = ready
        self._sampled_at[plan.step] = ready
        self._in_flight.append(StepTimes(plan.step, seconds, began, ready))

    def take_result(self) -> StepTimes:
        """The oldest step in flight, which has ended."""
        return self._in_flight.popleft()
