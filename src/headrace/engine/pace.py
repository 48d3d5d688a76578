"""What an engine learns of its stages' pace from their reports, and what follows from it.

It sets how work is split into steps, never the tokens.
"""

import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from msgspec.structs import replace

from headrace.engine.link_time import LinkTime
from headrace.engine.microbatch_count import MicrobatchTuner, steps_in_a_round
from headrace.engine.rank_usage import RankUsage
from headrace.engine.step_cost import PRIOR, CostFit, StepCost, StepWork, dearest
from headrace.protocol.messages import Report
from headrace.protocol.ranks import Ranks

_log = logging.getLogger(__name__)


@dataclass
class Pace:
    """Adds up the reports on each step, and learns from them what steps cost.

    window: the most steps ever planned beyond the newest result. tuner: chooses the number of
    microbatches; None leaves it. priors: what a step is taken to cost each stage before it was
    measured; PRIOR if there are none.

    cost: of a step on the slowest stage. costs: on each stage.
    """

    ranks: Ranks
    window: int
    tuner: MicrobatchTuner | None = None
    priors: Items[StepCost] = ()
    cost: StepCost = field(init=False)
    costs: tuple[StepCost, ...] = field(init=False)
    _fits: list[CostFit] = field(init=False)
    _usage: list[RankUsage] = field(init=False)
    _link_time: LinkTime = field(init=False)
    # What steps carry whose reports are not all in, and how many are.
    _works: dict[int, StepWork] = field(default_factory=dict, init=False)
    _reports: dict[int, int] = field(default_factory=dict, init=False)
    _next_look: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.new_stages(self.priors or (PRIOR,) * self.ranks.num_stages)
        self._usage = [RankUsage()] * self.ranks.count
        self._link_time = LinkTime(self.ranks, self.window)

    def new_epoch(self) -> None:
        """Nobody reports any more on what was planned; steps begin at 0 again. Costs stay."""
        self._works.clear()
        self._reports.clear()
        self._next_look = 0
        self._link_time = LinkTime(self.ranks, self.window)
        self._usage = [replace(usage, newest_step=-1) for usage in self._usage]

    def new_stages(self, priors: Items[StepCost]) -> None:
        """The stages have other layers, or run elsewhere: what was learned of their costs is void.

        priors: what a step is taken to cost each, as at the beginning.
        """
        self.costs = tuple(priors)
        self.cost = dearest(self.costs, StepWork(1, 1, 1))
        self._fits = [CostFit(prior) for prior in self.costs]

    def planned(self, step: int, work: StepWork) -> None:
        """A step was planned, on which every stage will report."""
        self._works[step] = work

    def take(self, report: Report) -> bool:
        """Learn from a report on a step that was planned. Whether there are new costs: a step with
        tokens is over."""
        work = self._works[report.step]
        self._usage[report.rank] = self._usage[report.rank].plus(report)
        self._link_time.add(report)
        seconds = report.forward_s + report.sample_s
        self._fits[self.ranks.stage_of(report.rank)].add(work, seconds)
        self._reports[report.step] = self._reports.get(report.step, 0) + 1
        if self._reports[report.step] < self.ranks.count:
            return False
        del self._works[report.step], self._reports[report.step]
        if not work.tokens:
            return False
        self.costs = tuple(fit.cost for fit in self._fits)
        self.cost = dearest(self.costs, work)
        if self.tuner is not None:
            self.tuner.see(work)
        return True

    def look_due(self, step: int) -> bool:
        """Whether it is time, with this step over, to see if other microbatches pay."""
        return self.tuner is not None and step >= self._next_look

    def num_microbatches(self, step: int, current: int, work: StepWork) -> int:
        """How many groups should take turns; asked once a round of turns, when a look is due.

        work: a row of every decoding sequence. current: how many groups take turns now.
        """
        if self.tuner is None or not work.tokens:
            return current
        count = self.tuner.next_count(current, work, self.costs, self.link_s)
        self._next_look = step + steps_in_a_round(count, self.ranks.num_stages)
        if count != current:
            _log.info(
                "num_microbatches %d -> %d: %d sequences decode, a step of all takes the slowest "
                "stage %.1f ms, links take %.1f ms",
                current,
                count,
                work.tokens,
                max(cost.seconds(work) for cost in self.costs) * 1e3,
                self.link_s * 1e3,
            )
        return count

    def foretold(self, report: Report) -> tuple[StepWork, float]:
        """What the step of a report not yet taken in carries, and the seconds that it was taken to
        cost the stage."""
        work = self._works[report.step]
        return work, self.costs[self.ranks.stage_of(report.rank)].seconds(work)

    @property
    def usage(self) -> tuple[RankUsage, ...]:
        """What each rank reported, in all."""
        return tuple(self._usage)

    @property
    def link_s(self) -> float:
        """Seconds that a message between neighbours takes; 0 until it was measured."""
        return self._link_time.seconds

    @property
    def oldest_step(self) -> int | None:
        """The oldest step on which a stage has yet to report, if there is one."""
        return next(iter(self._works), None)

    def reported(self, step: int) -> bool:
        """Whether every stage has reported on this step."""
        return all(usage.newest_step >= step for usage in self._usage)

    def longest_s(self) -> float:
        """Seconds that the dearest step in flight should take the slowest stage."""
        costs = [fit.cost for fit in self._fits]
        return max((c.seconds(work) for work in self._works.values() for c in costs), default=0.0)

    def is_new(self, rank: int, step: int) -> bool:
        """Whether the rank's stage was never measured at such work as that of a step in flight."""
        work = self._works.get(step)
        return work is not None and not self._fits[self.ranks.stage_of(rank)].measured(work)
