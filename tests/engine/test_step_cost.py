import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.step_cost import (
    PRIOR,
    CostFit,
    StepCost,
    StepWork,
    chunk_attended,
    dearest,
    prior_cost,
    total_work,
)

TRUE = StepCost(fixed=4e-3, per_token=2e-4, per_position=6e-8, per_sampled=5e-5)


def decode_step(numbers: random.Random) -> StepWork:
    rows = numbers.randint(1, 64)
    return StepWork(rows, sum(numbers.randint(1, 3000) for _ in range(rows)), rows)


def mixed_step(numbers: random.Random) -> StepWork:
    start, count = numbers.randint(0, 3000), numbers.randint(1, 500)
    chunk = StepWork(count, chunk_attended(start, count), numbers.randint(0, 1))
    return total_work([decode_step(numbers), chunk])


def steps(
    numbers: random.Random, count: int, *kinds: Callable[[random.Random], StepWork]
) -> Iterator[StepWork]:
    for _ in range(count):
        yield numbers.choice(kinds)(numbers)


def worst_error(fit: CostFit, works: Iterator[StepWork]) -> float:
    return max(abs(fit.cost.seconds(w) / TRUE.seconds(w) - 1) for w in works)


@given(start=st.integers(0, 5000), count=st.integers(0, 300))
def test_a_chunks_attended_positions_are_those_of_its_tokens_added_up(
    start: int, count: int
) -> None:
    assert chunk_attended(start, count) == sum(p + 1 for p in range(start, start + count))


def test_a_step_without_tokens_costs_nothing() -> None:
    assert TRUE.seconds(StepWork(0, 0, 0)) == 0.0


def test_the_dearest_stage_depends_on_the_work() -> None:
    long_contexts, samples = StepCost(1e-3, 1e-4, 1e-6, 0.0), StepCost(1e-3, 1e-4, 0.0, 1e-3)
    stages = [long_contexts, samples]
    assert dearest(stages, StepWork(4, 100_000, 4)) is long_contexts
    assert dearest(stages, StepWork(4, 100, 4)) is samples


def test_exact_measurements_give_the_exact_cost() -> None:
    numbers, fit = random.Random(1), CostFit()
    for work in steps(numbers, 400, decode_step, mixed_step):
        fit.add(work, TRUE.seconds(work))
    assert worst_error(fit, steps(numbers, 200, decode_step, mixed_step)) < 0.01


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_steps_that_took_five_times_as_long_hardly_move_the_fit(seed: int) -> None:
    numbers, fit = random.Random(seed), CostFit()
    for work in steps(numbers, 1500, decode_step, mixed_step):
        slow = 5.0 if numbers.random() < 0.05 else 1.0
        fit.add(work, TRUE.seconds(work) * slow * numbers.lognormvariate(0.0, 0.15))
    assert worst_error(fit, steps(numbers, 200, decode_step, mixed_step)) < 0.1


def test_an_outlier_among_the_very_first_steps_is_overcome() -> None:
    numbers, fit = random.Random(0), CostFit()
    for number, work in enumerate(steps(numbers, 600, decode_step, mixed_step)):
        fit.add(work, TRUE.seconds(work) * (20.0 if number == 0 else 1.0))
    assert worst_error(fit, steps(numbers, 200, decode_step, mixed_step)) < 0.1


def test_a_machine_that_becomes_slower_is_followed() -> None:
    numbers, fit = random.Random(2), CostFit()
    for number, work in enumerate(steps(numbers, 6000, decode_step, mixed_step)):
        fit.add(work, TRUE.seconds(work) * (0.4 if number < 1000 else 1.0))
    assert worst_error(fit, steps(numbers, 200, decode_step, mixed_step)) < 0.1


def test_a_long_time_of_decoding_does_not_wipe_out_what_prefill_costs() -> None:
    numbers, fit = random.Random(3), CostFit()
    for work in steps(numbers, 300, mixed_step):
        fit.add(work, TRUE.seconds(work))
    for work in steps(numbers, 5000, decode_step):
        fit.add(work, TRUE.seconds(work))
    assert worst_error(fit, steps(numbers, 200, mixed_step)) < 0.05


def test_decode_steps_alone_predict_decode_and_keep_the_priors_proportions_otherwise() -> None:
    """Rows that decode have as many tokens as samples: only the sum of both costs is measured."""
    fit, twice = CostFit(), StepCost(*(2 * part for part in vars(PRIOR).values()))
    numbers = random.Random(4)
    for work in steps(numbers, 400, decode_step):
        fit.add(work, twice.seconds(work))
    assert vars(fit.cost) == pytest.approx(vars(twice), rel=0.02)
    same = CostFit()
    for _ in range(400):
        same.add(StepWork(8, 8000, 8), TRUE.seconds(StepWork(8, 8000, 8)))
    chunk = StepWork(500, chunk_attended(0, 500), 1)
    assert same.cost.seconds(StepWork(8, 8000, 8)) == pytest.approx(
        TRUE.seconds(StepWork(8, 8000, 8)), rel=0.01
    )
    assert 0.2 < same.cost.seconds(chunk) / TRUE.seconds(chunk) < 5


def test_the_first_step_already_sets_the_scale() -> None:
    fit, work = CostFit(), StepWork(100, 5050, 1)
    fit.add(work, 3.0)
    assert fit.cost.seconds(work) == pytest.approx(3.0, rel=0.05)


def test_steps_without_tokens_or_time_are_passed_over() -> None:
    fit = CostFit()
    fit.add(StepWork(0, 0, 0), 1.0)
    fit.add(StepWork(5, 15, 5), 0.0)
    assert fit.cost == PRIOR


@given(
    st.lists(
        st.tuples(
            st.builds(StepWork, st.integers(1, 5000), st.integers(1, 10**8), st.integers(0, 300)),
            st.floats(1e-6, 1e3),
        ),
        min_size=1,
        max_size=60,
    )
)
def test_whatever_is_measured_no_part_is_negative_and_each_is_finite(
    measured: list[tuple[StepWork, float]],
) -> None:
    fit = CostFit()
    for work, seconds in measured:
        fit.add(work, seconds)
        assert all(0 <= part < 1e9 for part in vars(fit.cost).values())


@pytest.mark.parametrize(("fixed_ms", "per_row_ms"), [(20.0, 0.0), (2.0, 0.3), (10.0, 0.1)])
def test_a_few_steps_of_another_size_tell_the_fixed_part_from_the_rows(
    fixed_ms: float, per_row_ms: float
) -> None:
    """As when the engine tries another number of microbatches after a long time with one."""
    fit = CostFit()
    for step in range(208):
        # The context grows by a position a row and step.
        rows = 32 if step < 200 else 64
        fit.add(StepWork(rows, rows * (32 + step), rows), (fixed_ms + per_row_ms * rows) / 1e3)
    for rows in (32, 64):
        predicted = fit.cost.seconds(StepWork(rows, rows * 240, rows)) * 1e3
        assert predicted == pytest.approx(fixed_ms + per_row_ms * rows, rel=0.04)


def test_the_prior_grows_with_the_stages_weights_and_its_arithmetic() -> None:
    assert prior_cost(1000, 1000) == PRIOR
    # 13 billion parameters, in bfloat16 and in four bits.
    chunk = StepWork(512, 512 * 256, 1)
    plain, packed = prior_cost(26 * 10**9, 13 * 10**9), prior_cost(7 * 10**9, 13 * 10**9)
    assert plain.seconds(chunk) > 90 * PRIOR.seconds(chunk)
    assert packed.seconds(chunk) > 90 * PRIOR.seconds(chunk)


def test_a_slow_machine_is_known_by_its_first_step_for_all_kinds_of_work() -> None:
    fit = CostFit(PRIOR)
    fit.add(StepWork(1, 1, 1), 40 * PRIOR.seconds(StepWork(1, 1, 1)))
    chunk = StepWork(512, 512 * 256, 1)
    assert fit.cost.seconds(chunk) == pytest.approx(40 * PRIOR.seconds(chunk), rel=0.1)


def test_work_is_measured_once_a_step_of_its_kind_and_about_its_size_was() -> None:
    fit = CostFit()
    decode, chunk = StepWork(4, 400, 4), StepWork(512, 512 * 256, 0)
    assert not fit.measured(decode)
    fit.add(decode, 0.1)
    assert fit.measured(decode)
    assert fit.measured(StepWork(8, 800, 8))
    assert not fit.measured(StepWork(4, 900, 4))
    assert not fit.measured(chunk)
    fit.add(chunk, 1.0)
    assert fit.measured(chunk)
    assert fit.measured(StepWork(500, 100_000, 4))


def test_a_step_of_which_the_fit_foretells_no_time_at_all_is_learned_from() -> None:
    """Times that grow faster than the sampled rows, and fall with all else, leave nothing for a
    step that samples none."""
    fit = CostFit()
    for _ in range(200):
        for rows in (1, 2, 4, 8):
            tokens = 32 // rows
            fit.add(StepWork(tokens, tokens * 9, rows), rows**2 * 1e-4)
    chunk = StepWork(16, 144, 0)
    assert fit.cost.seconds(chunk) == 0
    for _ in range(100):
        fit.add(chunk, 2e-5)
    assert fit.cost.seconds(chunk) > 0


def test_experts_are_read_as_far_as_tokens_pass_them() -> None:
    cost = StepCost(fixed=1e-3, per_token=0.0, per_position=0.0, per_sampled=0.0, experts=8e-3,
                    missed=0.75)  # fmt: skip
    assert cost.seconds(StepWork(1, 1, 1)) == pytest.approx(1e-3 + 2e-3)
    assert cost.seconds(StepWork(2, 2, 2)) == pytest.approx(1e-3 + 3.5e-3)
    assert cost.seconds(StepWork(500, 500, 500)) == pytest.approx(1e-3 + 8e-3)
    assert cost.seconds(StepWork(0, 0, 0)) == 0


def test_a_mixture_of_experts_is_foretold_within_15_percent_at_any_number_of_rows() -> None:
    """Of 64 experts a token passes 8; reading them takes longer than by the prior's proportion."""
    true = StepCost(2e-3, 2e-4, 6e-8, 5e-5, experts=40e-3, missed=7 / 8)
    prior = prior_cost(11 * 10**9, 10**9, 10**10, 7 / 8)
    assert prior.experts == pytest.approx(10 * prior.fixed)
    numbers, fit = random.Random(5), CostFit(prior)
    for work in steps(numbers, 300, mixed_step):
        fit.add(work, true.seconds(work) * numbers.uniform(0.97, 1.03))
    for work in steps(numbers, 300, decode_step):
        fit.add(work, true.seconds(work) * numbers.uniform(0.97, 1.03))
    for tokens in (1, 2, 4, 8, 16, 32, 64, 256):
        work = StepWork(tokens, tokens * 300, min(tokens, 32))
        assert fit.cost.seconds(work) == pytest.approx(true.seconds(work), rel=0.15), tokens
