"""What of a decode step is Python: all that a stage does from one result to the next, less the time
inside kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.bench.batch_run import Batch, run_batch
from headrace.bench.machine import machine, versions
from headrace.bench.running import running_engine
from headrace.bench.stage_steps import StepTime, step_times
from headrace.config import EngineConfig
from headrace.errors import UsageError
from headrace.protocol.plan import Plan, token_count


@dataclass(frozen=True)
class Overhead:
    """What was measured. kernels: the path that they take. rounds: each one's times of the steps in
    which every request decodes, and nothing else happens."""

    config: EngineConfig
    batch: Batch
    dtype: str
    kernels: str
    rounds: list[list[StepTime]]

    def as_json(self) -> dict[str, Any]:
        """The figures, in the units that the keys say: medians over all rounds' steps, and the
        least and the most of the rounds' own medians."""
        return {
            "model": self.config.model,
            "pp": 1,
            "dtype": self.dtype,
            "kernels": self.kernels,
            "num_prompts": self.batch.num_prompts,
            "input_len": self.batch.input_len,
            "output_len": self.batch.output_len,
            "rounds": len(self.rounds),
            "steps": sum(len(steps) for steps in self.rounds),
            **self._spread("step_us", lambda step: step.seconds * 1e6),
            **self._spread("python_us_per_step", lambda step: _python_s(step) * 1e6),
            **self._spread("python_share", lambda step: _python_s(step) / step.seconds),
            "kernel_calls_per_step": self.rounds[0][0].calls,
            "machine": machine(),
            "versions": versions(),
        }

    def _spread(self, name: str, figure: Callable[[StepTime], float]) -> dict[str, float]:
        values = [[figure(step) for step in steps] for steps in self.rounds]
        medians = [float(np.median(steps)) for steps in values]
        return {
            name: float(np.median([value for steps in values for value in steps])),
            f"{name}_min": min(medians),
            f"{name}_max": max(medians),
        }


def measure_overhead(
    config: EngineConfig, batch: Batch, rounds: int, say: Callable[[str], None]
) -> Overhead:
    """Record a run of the batch, and repeat its plans on the stage alone. say: told what runs.

    config: of a pipeline of one stage, with room for all requests at once. Raises what launch(),
    the engine and step_times() raise.
    """
    with running_engine(config, say) as running:
        say("recording a run")
        plans = run_batch(running.engine, batch).plans
    wanted = decode_steps(plans, batch.num_prompts)
    say("the same plans on the stage alone")
    times = step_times(running.stage_configs[0], running.cpus[0], running.num_blocks, plans, rounds)
    return Overhead(
        config=config,
        batch=batch,
        dtype=running.dtype,
        kernels=running.loaded[0].kernels,
        # The first plan has no time, and is never one of them: its requests have yet to come.
        rounds=[[steps[step - 1] for step in wanted] for steps in times],
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


def _python_s(step: StepTime) -> float:
    return step.seconds - step.kernel_s
