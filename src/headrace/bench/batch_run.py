"""One run of the same requests, all at once, on a pipeline that stays up, and what it showed."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from statistics import median

from headrace.engine.engine import Engine, Pipeline
from headrace.engine.scheduler import Scheduler
from headrace.engine.stage_usage import StageUsage
from headrace.protocol.messages import Report, Result, Timeline
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
        """Positions of a request in whole blocks, and a block more, since the scheduler keeps one
        free for each that decodes: so a cache holds all of this load, and not much else."""
        return (-(-(self.input_len + self.output_len) // block_size) + 1) * block_size


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
    usage: list[StageUsage]

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
    def slowest_stage(self) -> int:
        """The stage that computed the longest."""
        busy = [usage.busy_s for usage in self.usage]
        return busy.index(max(busy))


def run_batch(engine: Engine, batch: Batch) -> BatchRun:
    """Run the batch to its end on an engine that has nothing to do; stages' totals begin anew.

    Greedy, and an end-of-text token ends nothing.
    """
    params = SamplingParams(temperature=0.0, max_tokens=batch.output_len, ignore_eos=True)
    pipeline = engine.pipeline
    recorder = _Recorder(pipeline, engine.scheduler)
    engine.usage = [StageUsage() for _ in engine.usage]
    prompts = batch.prompts(engine.vocab_size)
    output_tokens = 0
    began = ended = time.monotonic()
    for prompt in prompts:
        engine.add(prompt, params)
    engine.pipeline = recorder
    try:
        while not engine.settled:
            if tokens := sum(delta.token is not None for delta in engine.step()):
                output_tokens += tokens
                ended = time.monotonic()
    finally:
        engine.pipeline = pipeline
    return BatchRun(
        plans=recorder.plans,
        began=began,
        seconds=ended - began,
        output_tokens=output_tokens,
        num_microbatches=Counter(recorder.counts).most_common(1)[0][0],
        step_ends=recorder.ends_on(len(engine.usage) - 1),
        usage=engine.usage,
    )


def median_run(runs: Items[BatchRun]) -> BatchRun:
    """The run of median speed; of two in the middle the slower."""
    return sorted(runs, key=lambda run: run.tokens_per_s)[(len(runs) - 1) // 2]


@dataclass
class _Recorder:
    """The pipeline, with notes of what passes. counts: microbatches at each plan."""

    pipeline: Pipeline
    scheduler: Scheduler
    plans: list[Plan] = field(default_factory=list, init=False)
    counts: list[int] = field(default_factory=list, init=False)
    reports: list[Report] = field(default_factory=list, init=False)

    def send(self, plan: Plan) -> None:
        self.plans.append(plan)
        self.counts.append(self.scheduler.num_microbatches)
        self.pipeline.send(plan)

    def receive(self, timeout_s: float) -> list[Result | Report]:
        messages = self.pipeline.receive(timeout_s)
        self.reports += [message for message in messages if isinstance(message, Report)]
        return messages

    def timelines(self, last: int, timeout_s: float) -> list[Timeline]:
        return self.pipeline.timelines(last, timeout_s)

    def signs_of_life(self) -> list[float]:
        return self.pipeline.signs_of_life()

    def ends_on(self, stage: int) -> list[float]:
        """When the stage was done with each step that has rows, in order."""
        with_rows = {plan.step for plan in self.plans if plan.rows}
        return [r.ended for r in self.reports if r.stage == stage and r.step in with_rows]
