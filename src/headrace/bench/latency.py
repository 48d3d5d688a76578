"""One request at a time: tokens a second, time to the first token and between tokens."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.bench.batch_run import Batch
from headrace.bench.figures import spread
from headrace.bench.machine import machine, versions
from headrace.bench.running import running_engine
from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.sampling_params import SamplingParams

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Latency:
    """What was measured. layers, kernels: of each stage; kernels is the path that they take.
    ready_s: from the launch until the engine was ready. token_times: for each round's request, the
    seconds from when it was added to each of its tokens."""

    config: EngineConfig
    batch: Batch
    dtype: str
    layers: list[int]
    kernels: list[str]
    ready_s: float
    token_times: list[list[float]]

    def as_json(self) -> dict[str, Any]:
        """The figures, in the units that the keys say.

        output_tokens_per_s: all of an answer's tokens over its whole time, the prompt's prefill
        included. ttft: time to the first token. token_ms: between two tokens, all rounds together.
        """
        config, batch = self.config, self.batch
        speeds = [len(times) / times[-1] for times in self.token_times]
        gaps = [b - a for times in self.token_times for a, b in itertools.pairwise(times)]
        return {
            "model": config.model,
            "pp": config.pipeline_parallel_size,
            "tp": config.tensor_parallel_size,
            "dtype": self.dtype,
            "input_len": batch.input_len,
            "output_len": batch.output_len,
            "rounds": len(self.token_times),
            **spread("output_tokens_per_s", speeds),
            "output_tokens_per_s_rounds": speeds,
            **spread("ttft_ms", [times[0] * 1e3 for times in self.token_times]),
            **{
                f"token_ms_p{percent}": float(np.percentile(gaps, percent)) * 1e3
                for percent in (50, 90, 99)
            },
            "ready_s": self.ready_s,
            "stages": [
                {"layers": layers, "kernels": kernels}
                for layers, kernels in zip(self.layers, self.kernels, strict=True)
            ],
            "machine": machine(),
            "versions": versions(),
        }


def measure_latency(config: EngineConfig, batch: Batch, say: Callable[[str], None]) -> Latency:
    """Run the batch's requests one after the other, each once. say: told what runs.

    The first also runs before, cut short, as a warm-up. Raises what launch() and the engine raise.
    """
    with running_engine(config, say) as running:
        engine = running.engine
        prompts = batch.prompts(engine.vocab_size)
        say("warm-up")
        _run_alone(engine, prompts[0], min(_WARM_UP_TOKENS, batch.output_len))
        token_times = []
        for number, prompt in enumerate(prompts, start=1):
            say(f"round {number} of {len(prompts)}")
            token_times.append(_run_alone(engine, prompt, batch.output_len))
    return Latency(
        config=config,
        batch=batch,
        dtype=running.card.dtype,
        layers=[stage.layers for stage in running.card.stages],
        kernels=[stage.kernels for stage in running.card.stages],
        ready_s=running.card.load_s,
        token_times=token_times,
    )


def _run_alone(engine: Engine, prompt: list[int], output_len: int) -> list[float]:
    """Seconds from adding the request to each token, handed out. Greedy; nothing ends it early."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    times: list[float] = []
    began = time.monotonic()
    engine.add(prompt, params)
    while not engine.settled:
        tokens = sum(delta.token is not None for delta in engine.step())
        times += [time.monotonic() - began] * tokens
    return times
