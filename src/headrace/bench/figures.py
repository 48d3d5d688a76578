"""What is said about how a load went, and how policies compare."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headrace.engine.prefill_policy import PrefillPolicyName

BUDGETS = (256, 512, 1024, 2048)


@dataclass(frozen=True)
class Setting:
    """A policy and the most tokens of a step under it."""

    prefill_policy: PrefillPolicyName
    max_num_batched_tokens: int


# The even policy has no use for a tight limit, so it gets the widest.
SETTINGS = (*(Setting("budget", tokens) for tokens in BUDGETS), Setting("even", max(BUDGETS)))


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median under the name, and the least and the most under name_min and name_max."""
    return {
        name: float(np.median(values)),
        f"{name}_min": min(values),
        f"{name}_max": max(values),
    }


@dataclass(frozen=True)
class Figures:
    """How a load went between its first arrival and its last (times to first token: of all).

    step_cost_mean_s, step_cost_cv: mean of the steps' cost, and their standard deviation over it.
    step_cost_change: mean difference between a step and the next, over the mean. bubble_fraction:
    the part of the stages' time that they were idle while requests were in the system. Rates are
    tokens a second: those accepted, and in total those computed, of prompts and outputs. ttft: time
    from arrival to first token, in seconds.
    """

    steps: int
    step_cost_mean_s: float
    step_cost_cv: float
    step_cost_change: float
    bubble_fraction: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float


def figures(
    *,
    costs: Sequence[float],
    busy_s: float,
    present_s: float,
    span_s: float,
    output_tokens: int,
    total_tokens: int,
    ttft: Sequence[float],
) -> Figures:
    """Sum up. busy_s: mean over the stages. present_s: time with requests, of span_s in all."""
    cost = np.array(costs) if costs else np.zeros(1)
    # A single step differs from no other.
    changes = np.abs(np.diff(cost)) if len(cost) > 1 else np.zeros(1)
    return Figures(
        steps=len(costs),
        step_cost_mean_s=float(cost.mean()),
        step_cost_cv=_over(float(cost.std()), float(cost.mean())) or 0.0,
        step_cost_change=_over(float(changes.mean()), float(cost.mean())) or 0.0,
        bubble_fraction=1 - busy_s / present_s if present_s > 0 else 0.0,
        output_tokens_per_s=_over(output_tokens, span_s) or 0.0,
        total_tokens_per_s=_over(total_tokens, span_s) or 0.0,
        ttft_p50_s=float(np.quantile(ttft, 0.5)),
        ttft_p99_s=float(np.quantile(ttft, 0.99)),
    )


def _over(value: float, other: float) -> float | None:
    """The ratio; None if there is none."""
    return value / other if other else None


# What the policies are judged by, and whether less is better.
_JUDGED_BY = {"bubble_fraction": True, "output_tokens_per_s": False, "ttft_p99_s": True}


def compare(results: dict[Setting, Figures]) -> dict[str, Any]:
    """All figures, and, if both policies ran, the even one's over those of the best budget (None
    where that is zero).

    The best budget is the one with the fewest bubbles; since another may be better otherwise, the
    ratios to the best of each figure are given as well.
    """
    answer: dict[str, Any] = {
        "policies": [asdict(setting) | asdict(figure) for setting, figure in results.items()]
    }
    budgets = {s: asdict(f) for s, f in results.items() if s.prefill_policy == "budget"}
    evens = [asdict(f) for s, f in results.items() if s.prefill_policy == "even"]
    if not budgets:
        return answer
    best = min(budgets, key=lambda setting: budgets[setting]["bubble_fraction"])
    answer["best_budget"] = {
        "max_num_batched_tokens": best.max_num_batched_tokens,
        "by": "bubble_fraction",
    }
    if evens:
        answer["even_over_best_budget"] = {
            name: _over(evens[0][name], budgets[best][name]) for name in _JUDGED_BY
        }
        answer["even_over_best_of_each_figure"] = {
            name: _over(evens[0][name], (min if less else max)(b[name] for b in budgets.values()))
            for name, less in _JUDGED_BY.items()
        }
    return answer
