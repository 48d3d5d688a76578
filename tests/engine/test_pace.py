import pytest

from headrace.engine.microbatch_count import MicrobatchTuner
from headrace.engine.pace import Pace
from headrace.engine.step_cost import PRIOR, StepCost, StepWork
from headrace.protocol.messages import Report
from headrace.protocol.ranks import Ranks

WORK = StepWork(4, 400, 4)


def report(step: int, rank: int, seconds: float = 0.25) -> Report:
    return Report(0, step, rank, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0, seconds, 0.0, None, [], 99)


def test_a_step_is_over_when_every_shard_of_every_stage_has_reported() -> None:
    pace = Pace(Ranks(2, 2), 4)
    pace.planned(0, WORK)
    assert [pace.take(report(0, rank)) for rank in (3, 0, 1)] == [False] * 3
    assert pace.oldest_step == 0
    assert not pace.reported(0)
    assert pace.costs == (PRIOR, PRIOR)
    assert pace.take(report(0, 2))
    assert pace.oldest_step is None
    assert pace.reported(0)
    assert pace.cost.seconds(WORK) == pytest.approx(0.25, rel=0.05)


def test_the_slowest_stage_sets_the_cost_of_a_step() -> None:
    pace = Pace(Ranks(3), 5)
    pace.planned(0, WORK)
    for rank, seconds in enumerate((0.1, 0.3, 0.2)):
        pace.take(report(0, rank, seconds))
    assert pace.cost == pace.costs[1]


def test_priors_hold_until_a_step_is_over() -> None:
    slow = StepCost(fixed=1.0, per_token=0.0, per_position=0.0, per_sampled=0.0)
    pace = Pace(Ranks(2), 4, priors=[PRIOR, slow])
    assert (pace.costs, pace.cost) == ((PRIOR, slow), slow)
    pace.planned(0, WORK)
    assert pace.foretold(report(0, 1)) == (WORK, 1.0)
    assert pace.longest_s() == 1.0


def test_a_step_without_tokens_teaches_nothing() -> None:
    pace = Pace(Ranks(1), 3)
    pace.planned(0, StepWork(0, 0, 0))
    assert not pace.take(report(0, 0))
    assert pace.oldest_step is None
    assert pace.cost == PRIOR


def test_a_new_epoch_forgets_its_steps_and_keeps_costs_and_totals() -> None:
    pace = Pace(Ranks(1), 3)
    for step in (0, 1):
        pace.planned(step, WORK)
    pace.take(report(0, 0))
    costs, busy_s = pace.costs, pace.usage[0].busy_s
    pace.new_epoch()
    assert pace.oldest_step is None
    assert not pace.reported(0)
    assert (pace.costs, pace.usage[0].busy_s) == (costs, busy_s)


def test_other_stages_cost_what_is_foretold_of_them() -> None:
    slow = StepCost(fixed=1.0, per_token=0.0, per_position=0.0, per_sampled=0.0)
    pace = Pace(Ranks(1), 3)
    pace.planned(0, WORK)
    pace.take(report(0, 0))
    pace.new_epoch()
    pace.new_stages([slow])
    pace.planned(0, WORK)
    assert (pace.costs, pace.cost) == ((slow,), slow)
    assert pace.is_new(0, 0)


def test_work_is_new_until_its_like_was_measured() -> None:
    pace = Pace(Ranks(1), 3)
    pace.planned(0, WORK)
    assert pace.is_new(0, 0)
    pace.planned(1, WORK)
    pace.take(report(0, 0))
    assert not pace.is_new(0, 1)
    assert not pace.is_new(0, 7)


def test_microbatches_are_looked_at_once_a_round_and_never_without_a_tuner() -> None:
    pace = Pace(Ranks(2), 4, MicrobatchTuner(1))
    assert pace.look_due(6)
    assert pace.num_microbatches(6, 1, StepWork(0, 0, 0)) == 1
    assert pace.look_due(6)
    assert pace.num_microbatches(6, 1, WORK) == 1
    assert [pace.look_due(step) for step in (7, 8)] == [False, True]
    pace.new_epoch()
    assert pace.look_due(0)
    assert not Pace(Ranks(2), 4).look_due(6)
