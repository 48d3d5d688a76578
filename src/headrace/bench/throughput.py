"""Output tokens a second of a whole load, all requests at once, on one engine that stays up."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from headrace.bench.batch_run import Batch, BatchRun, RunRecorder, median_run, run_batch
from headrace.bench.machine import machine, versions
from headrace.bench.running import running_engine
from headrace.config import EngineConfig
from headrace.host.cpus import StageCpus

# As many as other engines' benches run before the clock starts: prompts, and tokens of each answer.
_WARM_UP = 4, 8


@dataclass(frozen=True)
class Throughput:
    """What was measured. layers, cpus, kernels: of each stage; kernels is the path that they take.
    ready_s: from the launch until the engine was ready. runs: the rounds, in order."""

    config: EngineConfig
    batch: Batch
    dtype: str
    layers: list[int]
    cpus: list[StageCpus]
    kernels: list[str]
    ready_s: float
    runs: list[BatchRun]

    def as_json(self) -> dict[str, Any]:
        """The figures, in the units that the keys say: those of the median round, and the spread.

        total_tokens_per_s counts prompts, too. Stages are busy while they compute, between the
        round's first step and its last.
        """
        config, batch = self.config, self.batch
        median = median_run(self.runs)
        speeds = [run.tokens_per_s for run in self.runs]
        prompt_tokens = batch.num_prompts * batch.input_len
        return {
            "model": config.model,
            "pp": config.pipeline_parallel_size,
            "tp": config.tensor_parallel_size,
            "dtype": self.dtype,
            "num_prompts": batch.num_prompts,
            "input_len": batch.input_len,
            "output_len": batch.output_len,
            "max_num_seqs": config.sequences,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "rounds": len(self.runs),
            "output_tokens": median.output_tokens,
            "output_tokens_per_s": median.tokens_per_s,
            "output_tokens_per_s_min": min(speeds),
            "output_tokens_per_s_max": max(speeds),
            "output_tokens_per_s_rounds": speeds,
            "total_tokens_per_s": (prompt_tokens + median.output_tokens) / median.seconds,
            "ready_s": self.ready_s,
            "num_microbatches": median.num_microbatches,
            "step_ms_p50": median.step_s_p50 * 1e3,
            "stages": [
                {
                    "layers": layers,
                    "cpus": cpus.cpus,
                    "threads": cpus.threads,
                    "kernels": kernels,
                    "busy_fraction": usage.busy_fraction,
                }
                for layers, cpus, kernels, usage in zip(
                    self.layers, self.cpus, self.kernels, median.usage, strict=True
                )
            ],
            "machine": machine(),
            "versions": versions(),
        }


def measure_throughput(
    config: EngineConfig, batch: Batch, rounds: int, say: Callable[[str], None]
) -> Throughput:
    """Run the batch `rounds` times after a short warm-up. say: told what runs.

    Raises what launch() and the engine raise.
    """
    recorder = RunRecorder()
    with running_engine(config, say, recorder=recorder) as running:
        say("warm-up")
        prompts, tokens = _WARM_UP
        run_batch(
            running.engine,
            recorder,
            replace(
                batch,
                num_prompts=min(prompts, batch.num_prompts),
                output_len=min(tokens, batch.output_len),
            ),
        )
        runs = []
        for number in range(1, rounds + 1):
            say(f"round {number} of {rounds}")
            runs.append(run_batch(running.engine, recorder, batch))
    return Throughput(
        config=config,
        batch=batch,
        dtype=running.card.dtype,
        layers=[stage.layers for stage in running.card.by_rank],
        cpus=list(running.deployment.cpus),
        kernels=[stage.kernels for stage in running.card.by_rank],
        ready_s=running.card.load_s,
        runs=runs,
    )
