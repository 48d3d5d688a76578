import pytest

from headrace.bench.virtual_pipeline import VirtualPipeline
from headrace.engine.step_cost import StepCost, StepWork
from headrace.protocol.plan import Plan, Row, TokenRef, Yield

# A second for each token, so that times can be worked out by hand.
COST = StepCost(fixed=0.0, per_token=1.0, per_position=0.0, per_sampled=0.0)


def plan(step: int, inputs: list[int | TokenRef]) -> Plan:
    rows = [Row(0, inputs, 0, Yield.TOKEN)] if inputs else []
    return Plan(0, step, 0, rows, [], [], [])


def send(pipeline: VirtualPipeline, now: float, sent: Plan) -> None:
    tokens = sum(len(row.inputs) for row in sent.rows)
    pipeline.send(now, sent, StepWork(tokens, 0, 0))


def test_stages_run_steps_in_order_one_at_a_time() -> None:
    """Stage 1 waits for the dear step 1, and step 2 waits for it there."""
    pipeline = VirtualPipeline(3, COST)
    send(pipeline, 0.0, plan(0, [1]))
    send(pipeline, 0.0, plan(1, [1, 2, 3]))
    send(pipeline, 0.0, plan(2, [1]))
    assert pipeline.next_result_at == 3.0
    taken = [pipeline.take_result() for _ in range(3)]
    assert [step.began for step in taken] == [[0, 1, 2], [1, 4, 7], [4, 7, 10]]
    assert [step.ended for step in taken] == [3, 10, 11]
    assert [step.cost for step in taken] == [1, 3, 1]
    assert pipeline.next_result_at is None


def test_a_step_waits_for_the_tokens_it_refers_to() -> None:
    pipeline = VirtualPipeline(2, COST)
    send(pipeline, 0.0, plan(0, [1, 2]))
    send(pipeline, 0.0, plan(1, [TokenRef(0, 0)]))
    assert pipeline.take_result().ended == 4.0
    assert pipeline.take_result().began == [4.0, 5.0]


def test_a_step_waits_for_its_plan() -> None:
    pipeline = VirtualPipeline(2, COST)
    send(pipeline, 0.0, plan(0, [1]))
    send(pipeline, 10.0, plan(1, [1]))
    pipeline.take_result()
    assert pipeline.take_result().began == [10.0, 11.0]


def test_a_plan_without_rows_takes_no_time_but_its_turn() -> None:
    pipeline = VirtualPipeline(2, COST)
    send(pipeline, 0.0, plan(0, [1, 2]))
    send(pipeline, 0.0, plan(1, []))
    assert pipeline.take_result().ended == 4.0
    assert pipeline.next_result_at == pytest.approx(4.0)
