from headrace.engine.microbatches import Microbatches
from headrace.engine.request import Request, Run, Sequence
from headrace.engine.step_cost import StepCost
from headrace.protocol.plan import Sampling
from headrace.sampling_params import SamplingParams

BY_ROWS = StepCost(fixed=5.0, per_token=1.0, per_position=0.0, per_sampled=0.0)
BY_CONTEXT = StepCost(fixed=5.0, per_token=1.0, per_position=0.1, per_sampled=0.0)


def sequence(number: int, context: int = 10) -> Sequence:
    """One whose next row attends to `context` positions."""
    params = SamplingParams(max_tokens=50)
    one = Sequence(Request(number, [1] * context, params, 50), 0, Sampling(seed=0))
    one.run = Run(number, one.request.prompt, [], 0, context - 1)
    return one


def filled(count: int, contexts: list[int]) -> tuple[Microbatches, list[Sequence]]:
    groups = Microbatches(count)
    everyone = [sequence(n, context) for n, context in enumerate(contexts)]
    for one in everyone:
        groups.join(one, 0)
    return groups, everyone


def test_sequences_join_the_step_they_are_in_unless_another_group_is_smaller() -> None:
    groups = Microbatches(2)
    homes = []
    for number in range(6):
        one = sequence(number)
        groups.join(one, 1)
        homes.append(one.running.microbatch)
    assert homes == [1, 0, 1, 0, 1, 0]


def test_turns_go_round_and_start_after_the_group_planned_last() -> None:
    groups, _ = filled(3, [10, 10, 10])
    assert groups.turns() == [0, 1, 2]
    groups.planned(1, 1)
    assert groups.turns() == [2, 0, 1]


def test_work_counts_rows_and_the_positions_they_attend_to() -> None:
    groups, everyone = filled(1, [10, 20])
    assert groups.work(0) == (2, 30, 2)
    for one in everyone:
        one.running.planned_positions += 1
    groups.planned(0, 2)
    assert groups.work(0) == (2, 32, 2)
    groups.leave(everyone[0])
    assert groups.work(0) == (1, 21, 1)
    assert everyone[0].running.microbatch is None


def test_groups_that_endings_left_uneven_are_evened_out_one_by_one() -> None:
    groups, everyone = filled(2, [10] * 8)
    for one in [one for one in everyone if one.running.microbatch == 1]:
        groups.leave(one)
    for _ in range(8):
        groups.even_out(BY_ROWS)
    assert [len(groups.members(n)) for n in range(2)] == [2, 2]


def test_a_difference_of_one_row_stays() -> None:
    groups, everyone = filled(2, [10] * 3)
    before = [one.running.microbatch for one in everyone]
    groups.even_out(BY_ROWS)
    assert [one.running.microbatch for one in everyone] == before


def test_long_contexts_count_for_more_rows() -> None:
    # Rows of cost 2 and 11: one long context weighs as much as five short ones.
    groups, _ = filled(2, [100, 10, 100, 10, 10, 10])
    for _ in range(8):
        groups.even_out(BY_CONTEXT)
    loads = [BY_CONTEXT.added(groups.work(n)) for n in range(2)]
    assert abs(loads[0] - loads[1]) <= 4


def test_one_group_has_nothing_to_even_out() -> None:
    groups, everyone = filled(1, [10, 500])
    groups.even_out(BY_CONTEXT)
    assert [one.running.microbatch for one in everyone] == [0, 0]


def test_resizing_spreads_evenly_and_moves_no_more_than_needed() -> None:
    groups, everyone = filled(2, [10] * 9)
    groups.resize(3)
    assert [len(groups.members(n)) for n in range(3)] == [3, 3, 3]
    assert [s.running.microbatch for s in everyone].count(2) == 3, (
        "the others stayed where they were"
    )
    groups.resize(1)
    assert sorted(s.request.id for s in groups.members(0)) == list(range(9))
    assert groups.work(0) == (9, 90, 9)


def test_the_turn_goes_on_after_resizing() -> None:
    groups, _ = filled(4, [10] * 4)
    groups.planned(2, 1)
    groups.resize(2)
    assert groups.turns() == [1, 0]
