import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.microbatch_count import (
    MicrobatchTuner,
    best_count,
    round_seconds,
    window_of,
)
from headrace.engine.step_cost import StepCost, StepWork

MS = 1e-3


def stages(count: int, fixed_ms: float, per_row_ms: float) -> list[StepCost]:
    return [StepCost(fixed_ms * MS, 0.0, 0.0, per_row_ms * MS)] * count


def rows(count: int) -> StepWork:
    return StepWork(count, 100 * count, count)


@pytest.mark.parametrize("pp", [2, 4])
def test_where_a_step_costs_the_same_for_any_rows_one_group_is_enough(pp: int) -> None:
    for link_ms in (0, 10, 50):
        assert best_count(rows(64), stages(pp, 20, 0), link_ms * MS, most=64) == 1


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_where_it_grows_with_rows_one_group_a_stage_fills_the_pipeline(pp: int) -> None:
    assert best_count(rows(48), stages(pp, 0.1, 0.3), 0.0, most=64) == pp


def test_the_formula_is_the_designs() -> None:
    # R / max(m t(R/m), pp (t(R/m) + L)) with t(r) = 2 + 0.3 r ms.
    assert round_seconds(2, rows(64), stages(2, 2, 0.3), 0.0) == pytest.approx(23.2 * MS)
    assert round_seconds(1, rows(64), stages(2, 2, 0.3), 0.0) == pytest.approx(42.4 * MS)
    assert round_seconds(4, rows(64), stages(2, 2, 0.3), 50 * MS) == pytest.approx(113.6 * MS)


def test_each_group_reads_the_experts_that_its_own_rows_pass() -> None:
    # One row passes half of the experts, two pass three quarters, four 15/16.
    costs = [StepCost(0.0, 0.0, 0.0, 0.0, experts=16 * MS, missed=0.5)] * 2
    assert round_seconds(1, rows(4), costs, 0.0) == pytest.approx(30 * MS)
    assert round_seconds(2, rows(4), costs, 0.0) == pytest.approx(24 * MS)
    assert round_seconds(4, rows(4), costs, 0.0) == pytest.approx(32 * MS)


def test_the_largest_group_makes_the_way() -> None:
    # 16 rows in 5 groups: one has 4.
    seconds = round_seconds(5, rows(16), stages(2, 1, 1), 50 * MS)
    assert seconds == pytest.approx(2 * (1 + 4 + 50) * MS)


def test_uneven_stages_are_paced_by_the_slowest_and_pass_through_all() -> None:
    costs = [*stages(1, 10, 0), *stages(1, 2, 0)]
    assert round_seconds(3, rows(6), costs, 0.0) == pytest.approx(30 * MS)
    assert round_seconds(1, rows(6), costs, 0.0) == pytest.approx(12 * MS)


@given(
    pp=st.integers(2, 8),
    fixed_ms=st.floats(0, 50),
    per_row_ms=st.floats(0, 2),
    link_ms=st.floats(0, 100),
    running=st.integers(1, 256),
    most=st.integers(1, 64),
)
def test_no_other_number_is_faster_by_more_than_two_percent(
    pp: int, fixed_ms: float, per_row_ms: float, link_ms: float, running: int, most: int
) -> None:
    costs = stages(pp, fixed_ms, per_row_ms)
    best = best_count(rows(running), costs, link_ms * MS, most)
    assert 1 <= best <= min(most, running)
    chosen = round_seconds(best, rows(running), costs, link_ms * MS)
    for other in range(1, min(most, running) + 1):
        assert chosen <= round_seconds(other, rows(running), costs, link_ms * MS) * 1.0201


def test_it_moves_after_two_looks_and_by_the_smaller_step() -> None:
    tuner = MicrobatchTuner(most=64)
    costs = stages(2, 2, 0.3)
    assert tuner.next_count(2, rows(64), costs, 50 * MS) == 2
    wanted = best_count(rows(64), costs, 5 * MS, most=64)
    assert 2 < wanted < best_count(rows(64), costs, 50 * MS, most=64)
    assert tuner.next_count(2, rows(64), costs, 5 * MS) == wanted


def test_a_number_that_is_as_good_stays_unless_clearly_fewer_are() -> None:
    costs = stages(4, 2, 0.3)
    best = best_count(rows(64), costs, 50 * MS, most=64)
    for current, stays in ((best + 1, True), (3 * best, False)):
        tuner = MicrobatchTuner(most=64)
        looks = [tuner.next_count(current, rows(64), costs, 50 * MS) for _ in range(2)]
        assert (looks[-1] == current) is stays


def test_one_odd_look_changes_nothing() -> None:
    tuner = MicrobatchTuner(most=64)
    costs = stages(2, 0.1, 0.3)
    for link_s in (0.0, 50 * MS, 0.0, 50 * MS, 0.0):
        assert tuner.next_count(2, rows(64), costs, link_s) == 2


def test_looks_in_opposite_directions_change_nothing() -> None:
    tuner = MicrobatchTuner(most=64)
    for costs in (stages(2, 0.1, 0.3), stages(2, 20, 0)) * 3:
        assert tuner.next_count(2, rows(64), costs, 5 * MS) == 2


def test_it_comes_down_when_the_link_is_fast_again() -> None:
    tuner = MicrobatchTuner(most=64)
    costs = stages(4, 0.1, 0.3)
    count = 20
    for _ in range(2):
        count = tuner.next_count(count, rows(64), costs, 0.0)
    assert count == 4


def test_the_window_has_room_for_every_groups_step_and_two_more() -> None:
    assert [window_of(m, 4) for m in (1, 4, 9)] == [6, 6, 11]


def see_steps(tuner: MicrobatchTuner, *sizes: int) -> None:
    for size in sizes:
        tuner.see(StepWork(size, 100 * size, size))


@pytest.mark.parametrize(("current", "tried"), [(4, 2), (2, 1), (1, 2)])
def test_where_all_decode_steps_were_the_same_size_another_number_is_tried(
    current: int, tried: int
) -> None:
    tuner = MicrobatchTuner(most=64)
    see_steps(tuner, 16, 16, 16, 15)
    assert tuner.next_count(current, rows(64), stages(4, 2, 0.3), 0.0) == tried
    # Steps of the old size are still on their way.
    see_steps(tuner, 16)
    assert tuner.next_count(tried, rows(64), stages(4, 2, 0.3), 0.0) == tried
    see_steps(tuner, 32)
    # Then the formula decides at once.
    assert tuner.next_count(tried, rows(64), stages(4, 2, 0.3), 0.0) == 4


def test_a_trial_that_shows_nothing_ends_and_is_not_repeated() -> None:
    tuner = MicrobatchTuner(most=64)
    see_steps(tuner, 16)
    counts = [4]
    for _ in range(1, 40):
        # Only steps with prefill come.
        tuner.see(StepWork(500, 10_000, 20))
        counts.append(tuner.next_count(counts[-1], rows(64), stages(4, 2, 0.3), 0.0))
    assert counts.index(2) == 1
    assert counts[10:] == [4] * 30


def test_after_a_long_time_with_steps_of_one_size_it_tries_again() -> None:
    tuner = MicrobatchTuner(most=64)
    see_steps(tuner, 16, 24)
    for _ in range(2, 5003):
        tuner.see(StepWork(16, 1600, 16))
    assert tuner.next_count(4, rows(64), stages(4, 2, 0.3), 0.0) == 2


def test_where_sizes_differ_already_nothing_is_tried() -> None:
    tuner = MicrobatchTuner(most=64)
    see_steps(tuner, 16, 24)
    assert tuner.next_count(4, rows(64), stages(4, 2, 0.3), 0.0) == 4


def test_steps_with_prefill_tell_nothing_about_decode_steps() -> None:
    tuner = MicrobatchTuner(most=64)
    see_steps(tuner, 16)
    tuner.see(StepWork(500, 10_000, 20))
    assert tuner.next_count(4, rows(64), stages(4, 2, 0.3), 0.0) == 2


def test_a_single_sequence_has_nothing_to_try() -> None:
    tuner = MicrobatchTuner(most=64)
    see_steps(tuner, 1)
    assert [tuner.next_count(1, rows(1), stages(2, 2, 0.3), 0.0) for _ in range(4)] == [1] * 4


def test_one_microbatch_at_most_stays_one() -> None:
    tuner = MicrobatchTuner(most=1)
    see_steps(tuner, 8)
    assert tuner.next_count(1, rows(8), stages(2, 2, 0.3), 0.0) == 1
