"""Whole pipelines in one process, in many orders of events."""

import os
from collections import Counter

import pytest

from mutants import MUTANTS
from simulator import Deadlock, simulate

# Raise it by the environment for a long search, or use `make simulate`.
SEEDS = int(os.environ.get("HEADRACE_SIMULATION_SEEDS", "200"))

SITUATIONS = {
    "reference",
    "empty plan",
    "only chunks, no feedback",
    "chunks beside decoding rows",
    "prefix found",
    "preemption",
    "admitted again",
    "slot given out by the next plan",
    "abort",
    "stop",
    "stop string",
    "change with steps in flight",
    "change by the tuner",
    "plan of another epoch",
    "stall",
    "the engine slept",
    "rules shared",
    "rules kept over a preemption",
    "epoch lost",
    "epoch lost before its first result",
    "epoch lost with steps in flight",
    "message of a lost epoch",
    "one rank of several lost",
    "a link lost, no rank",
    "a stage died of a request",
    "request blamed",
}


def test_any_order_of_events_gives_each_request_its_own_tokens() -> None:
    reached: Counter[str] = Counter()
    for seed in range(SEEDS):
        reached += simulate(seed).reached
    if SEEDS >= 100:
        assert {name for name, times in reached.items() if times} == SITUATIONS


def test_references_name_only_steps_whose_result_the_engine_does_not_have() -> None:
    """Contract 1, point 3: a sequence waits for nothing once the engine has its token."""
    simulation = simulate(3)
    results = 0
    for plan in simulation.plans:
        for row in plan.rows:
            for token in row.inputs:
                if not isinstance(token, int):
                    assert 0 < plan.step - token.step < simulation.window
                    results += 1
    assert results, "the seed has no references: take another"


def test_the_same_seed_replays_the_same_plans_at_the_same_moments() -> None:
    first, second = simulate(11), simulate(11)
    assert first.plans == second.plans
    assert first.clock.now == second.clock.now > 0


def failure(fault: str) -> BaseException:
    """What the first seed that finds the fault raises."""
    mutant = next(mutant for mutant in MUTANTS if mutant.fault == fault)
    with mutant.planted():
        for seed in range(50):
            try:
                simulate(seed)
            except Exception as error:
                return error
    pytest.fail(f"no seed finds {fault}")


def test_a_failing_seed_replays_exactly_and_says_what_happened_last() -> None:
    first, second = failure("wait skipped"), failure("wait skipped")
    assert first.__notes__ == second.__notes__
    assert first.__notes__[0].startswith("seed ")
    assert len(first.__notes__) > 20
    assert "stage 0" in "".join(first.__notes__)
    assert "StepDone" in "".join(first.__notes__)


def test_a_pipeline_in_which_nothing_can_happen_any_more_is_found_at_once() -> None:
    error = failure("waiting sequences are never admitted")
    assert isinstance(error, Deadlock)
