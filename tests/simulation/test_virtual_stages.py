"""Stages in virtual time: what steps take, to the second, and how they fail."""

from dataclasses import dataclass, field

import pytest
import torch

from headrace.errors import PipelineError
from headrace.execution.executor import PlanOrderError
from headrace.execution.synthetic_executor import SyntheticExecutor
from headrace.pipeline.effects import Effect
from headrace.pipeline.stage_loop import _Stage
from headrace.protocol.messages import Report, Result, Stop, SyntheticTime
from headrace.protocol.plan import Plan, Row, TokenRef, Yield
from headrace.protocol.ranks import Ranks
from headrace.simulation.virtual_links import VirtualClock, VirtualNetwork
from headrace.simulation.virtual_stages import VirtualStages

STEP_S = 20.0


@dataclass
class Run:
    """Stages that take STEP_S a step, and decoding rows that refer to the group's last step."""

    num_stages: int
    groups: int
    num_shards: int = field(default=1, kw_only=True)
    latency: float = 0.0
    blocking: bool = False
    socket_delay: float = 0.0
    slow: dict[tuple[int, int], float] = field(default_factory=dict)
    clock: VirtualClock = field(default_factory=VirtualClock)
    results: list[Result] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)

    def __post_init__(self) -> None:
        executor = SyntheticExecutor(SyntheticTime(STEP_S, 0.0), 1, torch.float32, real_time=False)
        self.window = self.groups + 2
        ranks = Ranks(self.num_stages, self.num_shards)
        self.stages = VirtualStages(
            self.clock,
            VirtualNetwork(self.clock, ranks, lambda channel: self.latency),
            [executor] * ranks.count,
            self.window,
            max_rows=1,
            num_shards=self.num_shards,
            blocking_feedback=self.blocking,
            compute_s=self._compute_s,
            socket_delay=lambda stage: self.socket_delay,
            link_timeout=1000.0,
        )

    def _compute_s(self, stage: int, plan: Plan, kind: str) -> float:
        return self.slow.get((stage, plan.step), STEP_S) if kind == "forward" else 0.0

    def steps(self, count: int) -> None:
        """Run so many steps, `window` of them in flight."""
        planned = 0
        while len(self.results) < count:
            while planned < min(count, len(self.results) + self.window):
                self.stages.send(decode(planned, self.groups))
                planned += 1
            for message in self.stages.receive(timeout_s=10_000.0):
                if isinstance(message, Result):
                    self.results.append(message)
                else:
                    self.reports.append(message)

    def pace(self) -> float:
        """Seconds between two steps, far from the beginning."""
        self.steps(8 * self.groups + 2)
        ends = [r.ended for r in self.reports if r.rank == self.num_stages - 1]
        first, last = 4 * self.groups, 8 * self.groups
        return (ends[last] - ends[first]) / (last - first)


def decode(step: int, groups: int) -> Plan:
    earlier = step - groups
    token: int | TokenRef = 1 if earlier < 0 else TokenRef(earlier, 0)
    row = Row(0, [token], 0 if earlier < 0 else None, Yield.TOKEN)
    return Plan(0, step, step % groups, [row], [], [], [])


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("latency", [0.0, 10.0, 50.0])
@pytest.mark.parametrize("groups", [1, 2, 4, 9])
def test_the_pace_is_that_of_the_formula(num_stages: int, latency: float, groups: int) -> None:
    """A round of m steps takes max(m t, pp (t + L)); receives are posted in time."""
    around = max(groups * STEP_S, num_stages * (STEP_S + latency))
    assert Run(num_stages, groups, latency).pace() == pytest.approx(around / groups)


def test_blocking_feedback_takes_the_whole_way_round_for_every_step() -> None:
    assert Run(2, 2, latency=10.0, blocking=True).pace() == pytest.approx(2 * (STEP_S + 10.0))


def test_each_shard_of_a_stage_runs_every_step_and_one_tells_the_result() -> None:
    run = Run(3, 2, latency=1.0, num_shards=2)
    run.steps(10)
    run.stages.stop()
    run.reports += [m for m in run.stages.receive(0.0) if isinstance(m, Report)]
    assert [result.step for result in run.results] == list(range(10))
    done = {rank: [r.step for r in run.reports if r.rank == rank] for rank in range(6)}
    assert done == {rank: list(range(10)) for rank in range(6)}


def test_reports_add_up_to_the_time_that_has_passed() -> None:
    run = Run(3, 1, latency=5.0)
    run.steps(20)
    for stage in range(3):
        reports = [report for report in run.reports if report.rank == stage]
        assert [report.step for report in reports] == list(range(len(reports)))
        accounted = sum(
            r.plan_wait_s + r.feedback_wait_s + r.activation_wait_s + r.forward_s + r.sample_s
            + r.send_wait_s
            for r in reports
        )  # fmt: skip
        assert accounted == pytest.approx(reports[-1].ended)
        assert {report.forward_s for report in reports} == {STEP_S}


def test_time_lines_show_what_each_stage_is_at() -> None:
    run = Run(2, 1, socket_delay=1.0)
    run.stages.send(decode(0, 1))
    assert run.stages.receive(timeout_s=5.0) == []
    first, last = run.stages.timelines(last=3, timeout_s=0.0)
    assert [(a.kind, a.step, a.ended) for a in first.activities][-1] == ("forward", 0, None)
    assert [(a.kind, a.step, a.ended) for a in last.activities][-1] == ("activation_wait", 0, None)
    assert run.stages.signs_of_life() == [0.0, 0.0]
    assert first.now == 5.0


def test_plans_and_results_take_their_sockets_time() -> None:
    run = Run(1, 1, socket_delay=3.0)
    run.steps(1)
    assert run.clock.now == 3 + STEP_S + 3


def test_receive_waits_no_longer_than_it_is_told() -> None:
    run = Run(1, 1)
    assert run.stages.receive(timeout_s=7.0) == []
    assert run.clock.now == 7


def test_a_stage_that_takes_too_long_is_told_by_the_one_that_waits_for_it() -> None:
    run = Run(3, 1, slow={(1, 2): 5000.0})
    with pytest.raises(PipelineError, match="stage 2: waiting for activations from stage 1"):
        run.steps(4)
    assert 1000 < run.clock.now < 1200


def test_a_message_that_is_never_sent_is_an_error_and_no_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(*_: object) -> list[Effect]:
        return []

    monkeypatch.setattr(_Stage, "_feed_back", nothing)
    with pytest.raises(PipelineError, match="stage 0: waiting for feedback from stage 1"):
        Run(2, 1).steps(2)


def test_messages_of_another_epoch_reach_nobody() -> None:
    run = Run(2, 1)
    for stage in range(2):
        run.stages.send_to(stage, Plan(1, 0, 0, [], [], [], []))
        run.stages.send_to(stage, Stop(1))
    run.steps(3)
    run.stages.stop()
    assert [result.step for result in run.results] == [0, 1, 2]


def test_a_fault_of_a_stage_is_raised_as_it_is() -> None:
    run = Run(2, 1)
    run.stages.send(decode(1, 1))
    with pytest.raises(PlanOrderError, match="got plan 1, due was plan 0"):
        run.stages.receive(timeout_s=1.0)


def test_stop_runs_what_is_held_and_drains_every_link() -> None:
    run = Run(2, 2, latency=1.0)
    for step in range(3):
        run.stages.send(decode(step, 2))
    run.stages.stop()
    steps = [m.step for m in run.stages.receive(timeout_s=0.0) if isinstance(m, Result)]
    assert steps == [0, 1, 2]
