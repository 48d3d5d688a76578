import pytest
import torch

from headrace.pipeline.feedback import Feedback, FeedbackRing, InputIds
from headrace.protocol.plan import Plan, Row, TokenRef, Yield

CPU = torch.device("cpu")


def plan(step: int, *rows: Row) -> Plan:
    return Plan(0, step, 0, list(rows), [], [], [])


def decode(step: int, row: int) -> Row:
    return Row(0, [TokenRef(step, row)], None, Yield.TOKEN)


def chunk() -> Row:
    return Row(0, [5, 6, 7], 0, Yield.NOTHING)


def filled(steps: int, window: int = 3) -> FeedbackRing:
    """Row r of step s sampled 10 s + r; of three rows the middle one samples nothing."""
    ring = FeedbackRing(window, 4, CPU)
    for step in range(steps):
        feedback = Feedback(plan(step, decode(0, 0), chunk(), decode(0, 0)))
        ring.claim(step, 3).copy_(feedback.encode([10 * step, 10 * step + 2], CPU))
    return ring


def test_rows_that_sample_nothing_have_count_zero() -> None:
    feedback = Feedback(plan(3, decode(0, 0), chunk(), decode(1, 0)))
    assert feedback.rows == [0, 2]
    assert feedback.encode([8, 9], CPU).tolist() == [[1, 8], [0, 0], [1, 9]]
    assert feedback.encode([8, 9], CPU).dtype == torch.int32


def test_as_many_tokens_as_rows_that_sample_are_taken() -> None:
    feedback = Feedback(plan(3, decode(0, 0), decode(1, 0)))
    with pytest.raises(ValueError, match="1 tokens were sampled for 2 rows"):
        feedback.encode([8], CPU)


def test_ids_and_references_to_several_steps_keep_their_order() -> None:
    inputs = InputIds(plan(5, decode(3, 2), chunk(), decode(1, 0)))
    assert inputs.steps == [1, 3]
    assert filled(5).gather(inputs).tolist() == [32, 5, 6, 7, 10]


def test_a_reference_to_a_row_that_sampled_nothing_is_an_error() -> None:
    with pytest.raises(LookupError, match="row 1 of step 4"):
        filled(5).gather(InputIds(plan(5, decode(4, 1))))


@pytest.mark.parametrize("step", [0, 7])
def test_a_reference_to_a_step_that_is_not_held_is_an_error(step: int) -> None:
    with pytest.raises(LookupError, match=f"step {step} is not held"):
        filled(7).gather(InputIds(plan(7, decode(step, 0))))


def test_a_ring_holds_two_windows_less_one() -> None:
    ring = filled(7, window=3)
    for step in range(2, 7):
        assert ring.buffer(step)[0, 1] == 10 * step
