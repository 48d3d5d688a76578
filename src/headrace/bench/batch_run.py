"""One run of the same requests, all at once, on a pipeline that stays up, and what it showed."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from statistics import median

from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.rank_usage import RankUsage
from headrace.engine.step_cost import StepWork
from headrace.protocol.messages import Report, Result
from headrace.protocol.plan import Plan
from headrace.sampling_params import SamplingParams


@dataclass(frozen=True)
class Batch:
    """Requests of the same lengths, in tokens; the prompts' tokens are drawn by seed."""

    num_prompts: int
    input_len: int
    output_len: int
    seed: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids of every prompt."""
        numbers = random.Random(self.seed)
        return [
            numbers.choices(range(vocab_size), k=self.input_len) for _ in range(self.num_prompts)
        ]

    def max_model_len(self, block_size: int) -> int:
        """Positions of a request in whole blocks, and a block more: the scheduler keeps one free
        for each that decodes. So a cache holds all of this load, and not much else."""
        return (-(-(self.input_len + self.output_len) // block_size) + 1) * block_size

    def fitted(self, config: EngineConfig) -> EngineConfig:
        """The settings with room for this load, and no more slots than it has requests."""
        return replace(
            config,
            max_model_len=self.max_model_len(config.block_size),
            max_num_seqs=min(config.sequences, self.num_prompts),
        )


@dataclass(frozen=True)
class BatchRun:
    """What a run showed. plans: all of it, from an empty pipeline to an empty one.

    began: when the requests were handed in, on time.monotonic's clock. seconds: from then until the
    last token was handed out. num_microbatches: that most of its steps were planned with.
    step_ends: when the last stage was done with each step that has rows, in seconds of its clock.
    """

    plans: list[Plan]
    began: float
    seconds: float
    output_tokens: int
    num_microbatches: int
    step_ends: list[float]
    usage: list[RankUsage]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds

    @property
    def steps(self) -> int:
        """Steps that have rows."""
        return sum(bool(plan.rows) for plan in self.plans)

    @property
    def step_s(self) -> float:
        """Seconds a step that has rows, filling and draining the pipeline included."""
        return self.seconds / self.steps

    @property
    def step_s_p50(self) -> float:
        """Median seconds between the ends of consecutive steps on the last stage."""
        gaps = [after - before for before, after in itertools.pairwise(self.step_ends)]
        return median(gaps) if gaps else self.step_s

    @property
    def slowest_rank(self) -> int:
        """The rank that computed the longest."""
        busy = [usage.busy_s for usage in self.usage]
        return busy.index(max(busy))


class RunRecorder:
    """What passes between an engine and its stages, from one begin() to the next.

    plans: in order. counts: microbatches at each plan.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was noted so far."""
        self.plans: list[Plan] = []
        self.counts: list[int] = []
        self._reports: list[Report] = []

    def on_plan(self, plan: Plan, num_microbatches: int) -> None:
        """Note it."""
        self.plans.append(plan)
        self.counts.append(num_microbatches)

    def on_result(self, result: Result) -> None:
        """Nothing to note: the tokens are handed out."""

    def on_report(self, report: Report, work: StepWork, predicted_s: float) -> None:
        """Note it."""
        self._reports.append(report)

    @property
    def usage(self) -> list[RankUsage]:
        """How busy each stage was."""
        usage = [RankUsage()] * (1 + max(report.rank for report in self._reports))
        for report in self._reports:
            usage[report.rank] = usage[report.rank].plus(report)
        return usage

    @property
    def step_ends(self) -> list[float]:
        """When the last stage was done with each step that has rows, in order."""
        with_rows = {plan.step for plan in self.plans if plan.rows}
        last = max(report.rank for report in self._reports)
        return [r.ended for r in self._reports if r.rank == last and r.step in with_rows]


def run_batch(engine: Engine, recorder: RunRecorder, batch: Batch) -> BatchRun:
    """Run the batch to its end on an engine that has nothing to do, and this recorder.

    Greedy, and an end-of-text token ends nothing.
    """
    params = SamplingParams(temperature=0.0, max_tokens=batch.output_len, ignore_eos=True)
    recorder.begin()
    prompts = batch.prompts(engine.vocab_size)
    output_tokens = 0
    began = ended = time.monotonic()
    for prompt in prompts:
        engine.add(prompt, params)
    while not engine.settled:
        if tokens := sum(delta.token is not None for delta in engine.step()):
            output_tokens += tokens
            ended = time.monotonic()
    return BatchRun(
        plans=recorder.plans,
        began=began,
        seconds=ended - began,
        output_tokens=output_tokens,
        num_microbatches=Counter(recorder.counts).most_common(1)[0][0],
        step_ends=recorder.step_ends,
        usage=recorder.usage,
    )


def median_run(runs: Items[BatchRun]) -> BatchRun:
    """The run of median speed; of two in the middle the slower."""
    return sorted(runs, key=lambda run: run.tokens_per_s)[(len(runs) - 1) // 2]
