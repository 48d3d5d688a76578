import json

from command import run
from headrace.bench.microbatches import Case, compare


def test_auto_does_as_well_as_the_best_fixed_number() -> None:
    for case in (Case(2, "2+0.3", 12, 0.0), Case(2, "2+0.3", 12, 20.0), Case(2, "20+0", 12, 5.0)):
        found = compare(case)
        assert found.auto_per_s >= 0.95 * found.best_per_s, found


def test_fewer_requests_than_stages_are_a_case_too() -> None:
    found = compare(Case(4, "5+0.1", 2, 0.0))
    assert found.best_fixed <= 2


def test_the_command_says_that_the_figures_are_synthetic() -> None:
    finished = run(
        "bench", "microbatches", "-pp", "2", "--synthetic-stage-ms", "5+0", "--num-prompts", "2",
        "--link-latency-ms", "0", "--json",
    )  # fmt: skip
    answer = json.loads(finished.out)
    assert "synthetic" in answer["pipeline"]
    (case,) = answer["cases"]
    assert case["auto"] == case["best_fixed"] == 1
