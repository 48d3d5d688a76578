import json

import pytest

from headrace.bench.figures import SETTINGS, Figures, Setting, compare, figures
from headrace.bench.mixed_load import LoadRequest, LoadShape, capacity, mixed_load
from headrace.bench.replay import replay, replay_orders, replay_policies
from headrace.engine.limits import SchedulerConfig
from headrace.engine.step_cost import StepCost, StepWork

FIGURES = {
    "step_cost_cv",
    "bubble_fraction",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "ttft_p50_s",
    "ttft_p99_s",
}
ONE_SECOND = StepCost(fixed=1.0, per_token=0.0, per_position=0.0, per_sampled=0.0)


def config(num_stages: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        block_size=4,
        num_blocks=64,
        num_microbatches=num_stages,
        window=num_stages + 2,
        eos_token_ids=frozenset(),
        prefix_caching=False,
        prefill_policy="budget",
    )


def test_one_request_alone_takes_a_pass_through_all_stages_for_each_token() -> None:
    """Two stages of a second a step, a prompt of one chunk, three tokens: each takes 2 s."""
    record = replay([LoadRequest(5.0, 10, 3)], config(2), ONE_SECOND, 2)
    assert record.tokens_at == {0: [7.0, 9.0, 11.0]}
    assert [step.began for step in record.steps] == [[5, 6], [7, 8], [9, 10]]


def test_idle_time_counts_as_bubble_only_while_requests_are_there() -> None:
    """Until the last arrival, 20 s: the first request is there for 4 s, in which two stages run
    for 2 s each; the second comes when the measurement ends."""
    load = [LoadRequest(0.0, 10, 2), LoadRequest(20.0, 10, 2)]
    summary = replay(load, config(2), ONE_SECOND, 2).figures()
    assert summary.bubble_fraction == pytest.approx(0.5)
    assert summary.output_tokens_per_s == pytest.approx(2 / 20)
    assert summary.total_tokens_per_s == pytest.approx(11 / 20)
    assert summary.ttft_p50_s == pytest.approx(2.0)


def test_every_request_ends_and_gives_its_tokens_under_each_policy() -> None:
    shape = LoadShape(1, 40, 1, 20)
    load = mixed_load(shape, 40, 5.0, seed=3)
    for name in ("budget", "even"):
        record = replay(load, SchedulerConfig(**vars(config(2)) | {"prefill_policy": name}),
                        StepCost(1e-2, 1e-3, 0.0, 0.0), 2)  # fmt: skip
        assert {n: len(at) for n, at in record.tokens_at.items()} == {
            n: r.output_length for n, r in enumerate(load)
        }
        assert sum(n for _, n in record.outputs) == sum(r.output_length for r in load)


def test_a_load_has_the_rate_and_the_lengths_asked_for() -> None:
    shape = LoadShape()
    load = mixed_load(shape, 4000, 8.0, seed=0)
    assert load == mixed_load(shape, 4000, 8.0, seed=0)
    assert load != mixed_load(shape, 4000, 8.0, seed=1)
    assert len(load) / load[-1].arrival_s == pytest.approx(8.0, rel=0.05)
    assert min(r.prompt_length for r in load) >= 16
    assert max(r.prompt_length for r in load) <= 4000
    assert sorted(r.prompt_length for r in load)[2000] == pytest.approx(253, rel=0.1)
    assert {r.output_length for r in load} == set(range(16, 501))


def test_capacity_is_what_steps_of_that_many_rows_serve() -> None:
    """20 rows and outputs of 10 tokens end 2 requests a step; 2 prompts of 100 come in."""
    shape = LoadShape(99, 101, 10, 10)
    cost = StepCost(fixed=0.5, per_token=1e-3, per_position=0.0, per_sampled=0.0)
    assert capacity(shape, cost, 20) == pytest.approx(2 / cost.seconds(StepWork(220, 0, 0)), 0.01)


def test_even_beats_every_budget_in_bubbles() -> None:
    answer = replay_policies(SETTINGS, num_stages=4, requests=60, load=0.85, seed=0)
    assert json.loads(json.dumps(answer)) == answer
    assert [(p["prefill_policy"], p["max_num_batched_tokens"]) for p in answer["policies"]] == [
        ("budget", 256),
        ("budget", 512),
        ("budget", 1024),
        ("budget", 2048),
        ("even", 2048),
    ]
    assert all(p.keys() > FIGURES for p in answer["policies"])
    assert answer["even_over_best_of_each_figure"]["bubble_fraction"] < 0.6
    assert {"seed", "load", "requests_per_s", "cost_of_a_stage", "pp"} <= answer.keys()


def test_beside_a_long_prompt_short_ones_and_streams_go_on() -> None:
    """What a prompt of 8,000 tokens does to others, in virtual time; the long one pays little."""
    answer = replay_orders(num_stages=2, requests=12, max_model_len=8192)
    assert json.loads(json.dumps(answer)) == answer
    first_come, shared = answer["orders"]
    assert first_come["short_ttft_max_s"] > 10
    assert shared["short_ttft_max_s"] < 1
    assert shared["long_ttft_ratio"] < 1.15
    assert shared["stream_gap_beside_max_s"] < first_come["stream_gap_beside_p50_s"] / 3
    undisturbed = shared["stream_gap_before_p50_s"]
    assert shared["stream_gap_beside_p50_s"] <= 9 * undisturbed


def test_the_smallest_loads_have_figures() -> None:
    """One step, no bubbles, no time between the arrivals: nothing is divided by zero."""
    single = figures(
        costs=[1.0],
        busy_s=0.0,
        present_s=0.0,
        span_s=0.0,
        output_tokens=0,
        total_tokens=0,
        ttft=[1.0],
    )
    assert (single.step_cost_cv, single.step_cost_change) == (0.0, 0.0)
    answer = compare({Setting("budget", 256): single, Setting("even", 512): single})
    assert answer["even_over_best_budget"]["bubble_fraction"] is None
    json.dumps(answer, allow_nan=False)


def some(bubbles: float, throughput: float, ttft: float) -> Figures:
    return Figures(9, 1.0, 0.1, 0.1, bubbles, throughput, throughput, ttft, ttft)


def test_the_best_budget_is_the_one_with_the_fewest_bubbles() -> None:
    answer = compare(
        {
            Setting("budget", 256): some(0.1, 100.0, 4.0),
            Setting("budget", 512): some(0.2, 125.0, 2.0),
            Setting("even", 512): some(0.05, 150.0, 3.0),
        }
    )
    assert answer["best_budget"] == {"max_num_batched_tokens": 256, "by": "bubble_fraction"}
    assert answer["even_over_best_budget"] == pytest.approx(
        {"bubble_fraction": 0.5, "output_tokens_per_s": 1.5, "ttft_p99_s": 0.75}
    )
    assert answer["even_over_best_of_each_figure"] == pytest.approx(
        {"bubble_fraction": 0.5, "output_tokens_per_s": 1.2, "ttft_p99_s": 1.5}
    )


def test_figures_of_one_policy_alone_are_not_compared() -> None:
    only_even = compare({Setting("even", 512): some(0.1, 1.0, 1.0)})
    assert only_even.keys() == {"policies"}
    only_budget = compare({Setting("budget", 512): some(0.1, 1.0, 1.0)})
    assert only_budget.keys() == {"policies", "best_budget"}


def test_figures_by_hand() -> None:
    summary = figures(
        costs=[1.0, 3.0, 1.0, 3.0],
        busy_s=6.0,
        present_s=8.0,
        span_s=10.0,
        output_tokens=20,
        total_tokens=50,
        ttft=[1.0, 2.0, 3.0],
    )
    assert summary.step_cost_cv == pytest.approx(0.5)
    assert summary.step_cost_change == pytest.approx(1.0)
    assert summary.bubble_fraction == pytest.approx(0.25)
    assert (summary.output_tokens_per_s, summary.total_tokens_per_s) == (2.0, 5.0)
    assert summary.ttft_p50_s == 2.0
