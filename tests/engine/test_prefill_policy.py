from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.engine.prefill_policy import (
    PrefillPolicy,
    PrefillPolicyName,
    Situation,
    StepAllowance,
    prefill_policy,
)
from headrace.engine.step_cost import NO_WORK, StepCost, StepWork, chunk_attended, total_work

COST = StepCost(fixed=5e-3, per_token=6e-5, per_position=1e-8, per_sampled=1e-5)
DECODE = StepWork(32, 32 * 800, 32)
BUSY = Situation(
    decode=DECODE,
    mean_decode=DECODE,
    pending=StepWork(6000, chunk_attended(0, 6000), 3),
    num_microbatches=4,
    free_fraction=0.6,
    cost=COST,
    max_tokens=2048,
)

parts = st.sampled_from([0.0, *(10.0**-n for n in range(2, 9))])
costs = st.builds(
    StepCost, parts, parts, parts, parts, experts=parts, missed=st.sampled_from([0.5, 31 / 32])
)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    rows, context = draw(st.integers(0, 256)), draw(st.integers(1, 4000))
    prompt = draw(st.integers(1, 100_000))
    decode = StepWork(rows, rows * context, rows)
    return Situation(
        decode=decode,
        mean_decode=draw(st.sampled_from([decode, NO_WORK, DECODE])),
        pending=StepWork(prompt, chunk_attended(0, prompt), 1),
        num_microbatches=draw(st.integers(1, 8)),
        free_fraction=draw(st.floats(0, 1)),
        cost=draw(costs),
        max_tokens=draw(st.integers(1, 4096)),
    )


def chunk_seconds(cost: StepCost, start: int, count: int, reported: bool = False) -> float:
    return cost.added(StepWork(count, chunk_attended(start, count), count * reported))


def granted(policy: PrefillPolicy, situation: Situation) -> int:
    return policy.allow(situation).take(0, situation.pending.tokens)


@given(
    costs,
    st.integers(0, 5000),
    st.floats(0, 10),
    st.integers(0, 10_000),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_an_allowance_gives_the_longest_chunk_that_fits(
    cost: StepCost, tokens: int, seconds: float, wanted: int, start: int, reported: bool
) -> None:
    count = StepAllowance(tokens, seconds, cost).take(start, wanted, reported)
    assert 0 <= count <= min(tokens, wanted)
    assert chunk_seconds(cost, start, count, reported) <= seconds * (1 + 1e-9)
    if count < min(tokens, wanted):
        assert chunk_seconds(cost, start, count + 1, reported) >= seconds * (1 - 1e-9)


def test_an_allowance_deducts_what_it_gave() -> None:
    allowance = StepAllowance(100, 1.0, COST)
    assert allowance.take(0, 60) == 60
    assert allowance.take(0, 60) == 40
    assert allowance.take(0, 60) == 0
    allowance = StepAllowance(10_000, chunk_seconds(COST, 500, 70), COST)
    assert allowance.take(500, 30) == 30
    assert allowance.take(530, 100) == pytest.approx(40, abs=1)
    assert allowance.take(0, 100) <= 1


def test_reported_tokens_are_deducted_as_sampled_rows_too() -> None:
    allowance = StepAllowance(10_000, chunk_seconds(COST, 500, 70, reported=True), COST)
    assert allowance.take(500, 30, reported=True) == 30
    assert allowance.take(530, 100, reported=True) == pytest.approx(40, abs=1)
    assert allowance.take(0, 100, reported=True) <= 1


def test_far_into_a_long_prompt_fewer_tokens_fit() -> None:
    fits = [StepAllowance(4096, 0.02, COST).take(start, 4096) for start in (0, 8000, 64_000)]
    assert fits[0] > fits[1] > fits[2] > 0


@pytest.mark.parametrize("name", ["budget", "even"])
@given(situation=situations())
def test_a_step_never_exceeds_its_tokens_and_never_starves_prefill(
    name: PrefillPolicyName, situation: Situation
) -> None:
    allowance = prefill_policy(name).allow(situation)
    room = situation.max_tokens - situation.decode.tokens
    wanted = situation.pending.tokens
    taken, start = 0, 1000
    while (count := allowance.take(start, wanted)) > 0:
        taken += count
        wanted -= count
        start += count
    assert taken <= max(room, 0)
    assert taken >= min(max(room, 0), situation.pending.tokens, 16)


@given(situation=situations())
def test_a_budget_is_filled_whatever_it_costs(situation: Situation) -> None:
    room = max(0, situation.max_tokens - situation.decode.tokens)
    assert granted(prefill_policy("budget"), situation) == min(room, situation.pending.tokens)


@given(situation=situations(), other=st.floats(0, 1))
def test_less_free_cache_never_means_more_prefill(situation: Situation, other: float) -> None:
    assume(other <= situation.free_fraction)
    tighter = replace(situation, free_fraction=other)
    assert granted(prefill_policy("even"), tighter) <= granted(prefill_policy("even"), situation)


def test_prefill_is_held_back_when_the_cache_runs_out() -> None:
    grants = [
        granted(prefill_policy("even"), replace(BUSY, free_fraction=free))
        for free in (0.0, 0.05, 0.1, 0.2, 0.6)
    ]
    assert grants[0] < grants[1] < grants[2] < grants[3] == grants[4]


@given(tokens=st.integers(1, 50_000), more=st.integers(0, 50_000))
def test_more_pending_never_means_less_prefill(tokens: int, more: int) -> None:
    few, many = (
        replace(BUSY, pending=StepWork(n, chunk_attended(0, n), 1)) for n in (tokens, tokens + more)
    )
    assert granted(prefill_policy("even"), few) <= granted(prefill_policy("even"), many)


def play(arrivals: dict[int, int], steps: int) -> list[float]:
    """The steps' cost when prompts of so many tokens come at those steps, groups uneven."""
    policy = prefill_policy("even")
    groups = [StepWork(n, n * 800, n) for n in (30, 34, 31, 33)]
    pending: list[tuple[int, int]] = []
    result = []
    for step in range(steps):
        if step in arrivals:
            pending.append((0, arrivals[step]))
        decode = groups[step % 4]
        works = [StepWork(n, chunk_attended(start, n), 0) for start, n in pending]
        allowance = policy.allow(
            replace(BUSY, decode=decode, mean_decode=DECODE, pending=total_work(works))
        )
        parts = [decode]
        left = []
        for start, wanted in pending:
            count = allowance.take(start, wanted)
            parts.append(StepWork(count, chunk_attended(start, count), 0))
            if count < wanted:
                left.append((start + count, wanted - count))
        pending = left
        result.append(COST.seconds(total_work(parts)))
    assert not pending
    return result


def test_a_long_prompt_is_spread_so_that_consecutive_steps_cost_the_same() -> None:
    result = play({0: 4000}, steps=60)
    assert result[:12] == pytest.approx([result[0]] * 12, rel=0.01)


def test_prompts_that_keep_coming_give_steps_of_one_cost() -> None:
    result = play(dict.fromkeys(range(0, 400, 7), 900), steps=460)
    steady = result[150:390]
    assert max(steady) < 1.15 * min(steady)


def test_with_one_group_a_prompt_that_is_not_long_goes_into_one_step() -> None:
    alone = replace(
        BUSY, num_microbatches=1, pending=StepWork(600, chunk_attended(0, 600), 1), max_tokens=8192
    )
    assert granted(prefill_policy("even"), alone) == alone.pending.tokens


def step_s(policy: PrefillPolicy, situation: Situation, start: int) -> float:
    """What the step costs if a long prompt is prefilled from that position."""
    count = policy.allow(situation).take(start, 10_000)
    chunk = StepWork(count, chunk_attended(start, count), 0)
    return situation.cost.seconds(total_work([situation.decode, chunk]))


def least_s(situation: Situation, start: int) -> float:
    """What the step costs with the few tokens that are prefilled in any case."""
    chunk = StepWork(16, chunk_attended(start, 16), 0)
    return situation.cost.seconds(total_work([situation.decode, chunk]))


@given(situation=situations(), start=st.integers(0, 100_000))
def test_prefill_makes_a_step_at_most_nine_times_as_long(situation: Situation, start: int) -> None:
    cost = situation.cost
    undisturbed = max(cost.seconds(situation.mean_decode), cost.seconds(StepWork(1, 1, 1)))
    step = step_s(prefill_policy("even"), situation, start)
    assert step <= max(9 * undisturbed, least_s(situation, start)) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["budget", "even"])
@given(situation=situations(), limit=st.floats(1e-6, 10), start=st.integers(0, 100_000))
def test_a_limit_is_kept_but_for_a_few_tokens(
    name: PrefillPolicyName, situation: Situation, limit: float, start: int
) -> None:
    limited = replace(situation, max_step_s=limit)
    step = step_s(prefill_policy(name), limited, start)
    assert step <= max(limit, least_s(situation, start)) * (1 + 1e-9)


def test_a_wide_limit_replaces_the_policys_own() -> None:
    alone = replace(BUSY, num_microbatches=1, max_tokens=8192, max_step_s=60.0)
    assert granted(prefill_policy("even"), alone) == alone.pending.tokens


def test_nine_times_costs_a_long_prompt_an_eighth_at_most() -> None:
    """Its time in such steps over the bare time of its tokens, at every depth."""
    for start in (0, 5000, 50_000):
        limited = replace(BUSY, num_microbatches=1, max_tokens=10**6)
        count = prefill_policy("even").allow(limited).take(start, 10**6)
        bare = chunk_seconds(COST, start, count)
        whole = COST.fixed + COST.added(DECODE) + bare
        assert whole / bare <= 9 / 8 + 0.02


def test_a_short_prompt_alone_is_not_cut_into_pieces_that_cost_less_than_the_fixed_part() -> None:
    idle = replace(
        BUSY, decode=NO_WORK, mean_decode=NO_WORK, pending=StepWork(60, chunk_attended(0, 60), 1)
    )
    assert granted(prefill_policy("even"), idle) == 60
