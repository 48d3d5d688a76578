"""What of a decode step is Python, all that a stage does from one result to the next, less the time
inside kernels; and which kernels the rest of a decode step and of a prefill step goes to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from headrace.bench.batch_run import Batch, RunRecorder, run_batch
from headrace.bench.machine import machine, versions
from headrace.bench.running import running_engine
from headrace.bench.stage_steps import StepTime, step_times
from headrace.checkpoint.locate import locate_model
from headrace.config import EngineConfig
from headrace.deployment.rank_setup import rank_config
from headrace.errors import UsageError
from headrace.protocol.plan import Plan, token_count


@dataclass(frozen=True)
class Overhead:
    """What was measured. kernels: the path that they take.

    decode: each round's times of the steps in which every request decodes, and nothing else
    happens. prefill: of all rounds, those of steps of nothing but prompts, of so many tokens each
    at the median.
    """

    config: EngineConfig
    batch: Batch
    dtype: str
    kernels: str
    decode: list[list[StepTime]]
    prefill: list[StepTime]
    prefill_tokens: int

    def as_json(self) -> dict[str, Any]:
        """The figures, in the units that the keys say: medians over all rounds' steps, and the
        least and the most of the rounds' own medians. profile: see profile()."""
        decode = [step for steps in self.decode for step in steps]
        return {
            "model": self.config.model,
            "pp": 1,
            "dtype": self.dtype,
            "kernels": self.kernels,
            "num_prompts": self.batch.num_prompts,
            "input_len": self.batch.input_len,
            "output_len": self.batch.output_len,
            "rounds": len(self.decode),
            "steps": len(decode),
            **self._spread("step_us", lambda step: step.seconds * 1e6),
            **self._spread("python_us_per_step", lambda step: step.python_s * 1e6),
            **self._spread("python_share", lambda step: step.python_s / step.seconds),
            "kernel_calls_per_step": decode[0].calls,
            "profile": {
                "decode": profile(decode, self.batch.num_prompts),
                "prefill": profile(self.prefill, self.prefill_tokens),
            },
            "machine": machine(),
            "versions": versions(),
        }

    def _spread(self, name: str, figure: Callable[[StepTime], float]) -> dict[str, float]:
        values = [[figure(step) for step in steps] for steps in self.decode]
        medians = [float(np.median(steps)) for steps in values]
        return {
            name: float(np.median([value for steps in values for value in steps])),
            f"{name}_min": min(medians),
            f"{name}_max": max(medians),
        }


def profile(steps: Sequence[StepTime], tokens: int) -> dict[str, Any]:
    """Where the time of steps of so many tokens goes, in percent, by part, and python.

    The mean of the steps' own shares: medians would not add up to 100.
    """
    parts = steps[0].parts
    percent = {part: 100 * fmean(s.parts[part] / s.seconds for s in steps) for part in parts}
    return {
        "tokens": tokens,
        "steps": len(steps),
        "step_us": float(np.median([step.seconds for step in steps])) * 1e6,
        "percent": {**percent, "python": 100 * fmean(s.python_s / s.seconds for s in steps)},
    }


def measure_overhead(
    config: EngineConfig, batch: Batch, rounds: int, say: Callable[[str], None]
) -> Overhead:
    """Record a run of the batch, and one that ends with its prompts, and repeat their plans on the
    stage alone. say: told what runs.

    config: of a pipeline of one stage, with room for all requests at once, and without a prefix
    cache. Raises what launch(), the engine and step_times() raise, and UsageError if the model is
    synthetic.
    """
    if locate_model(config.model).kind == "synthetic":
        raise UsageError("--model must be a real one: a synthetic model's stages have no kernels")
    recorder = RunRecorder()
    with running_engine(config, say, recorder=recorder) as running:
        say("recording a run")
        plans = run_batch(running.engine, recorder, batch).plans
        prompts = run_batch(running.engine, recorder, replace(batch, output_len=1)).plans
    decode = decode_steps(plans, batch.num_prompts)
    prefill = [len(plans) + place for place in full_steps(prompts)]
    plans += prompts
    say("the same plans on the stage alone")
    times = step_times(
        rank_config(running.deployment, 0),
        running.deployment.cpus[0],
        running.card.num_blocks,
        plans,
        rounds,
    )
    # The first plan has no time, and is none of those wanted: its requests have yet to come.
    return Overhead(
        config=config,
        batch=batch,
        dtype=running.card.dtype,
        kernels=running.card.stages[0].kernels,
        decode=[[steps[place - 1] for place in decode] for steps in times],
        prefill=[steps[place - 1] for steps in times for place in prefill],
        prefill_tokens=int(np.median([token_count(plans[place]) for place in prefill])),
    )


def decode_steps(plans: Sequence[Plan], requests: int) -> list[int]:
    """The places of plans in which every request has a decode row, and nothing else happens.

    Raises UsageError if there are none.
    """
    found = [
        place
        for place, plan in enumerate(plans)
        if len(plan.rows) == token_count(plan) == requests and not plan.admitted
    ]
    if not found:
        raise UsageError(
            f"the first of {requests} requests ended before the last one's prompt was in, so that "
            "no step had a decode row of each: give a longer --output-len or a shorter --input-len"
        )
    return found


def full_steps(plans: Sequence[Plan]) -> list[int]:
    """The places of plans with at least half as many tokens as the one with the most."""
    tokens = [token_count(plan) for plan in plans]
    return [place for place, count in enumerate(tokens) if 2 * count >= max(tokens)]
