"""Loads in real time on a real model, under each policy or order."""

import random
import time
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from headrace.bench.figures import Figures, Setting, compare, figures
from headrace.bench.long_load import CONTENDERS, Contender, LongFigures, LongLoad
from headrace.bench.mixed_load import LoadRequest, LoadShape, capacity, mixed_load
from headrace.bench.running import running_engine
from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.step_cost import StepCost, StepWork
from headrace.protocol.messages import Report, Result
from headrace.protocol.plan import Plan
from headrace.sampling_params import SamplingParams

_LONGEST_OUTPUT = 100
_REQUESTS_TO_CALIBRATE = 12
_WARM_UP_PROMPTS, _WARM_UP_OUTPUT = (16, 500, 40, 300), 16
# Decode rows of a step in the load that counts as all that the pipeline can serve.
_ROWS = 8


def run_policies(
    settings: Items[Setting],
    *,
    model: str,
    num_stages: int,
    requests: int,
    load: float,
    seed: int,
    max_model_len: int,
) -> dict[str, Any]:
    """The same load under each setting, each on a pipeline of its own; as JSON.

    load: the arrival rate over what the stages could serve without bubbles. That follows from the
    cost of a step, which is fitted beforehand, while a few requests run all at once.
    """
    shape = LoadShape(
        longest_prompt=max_model_len - _LONGEST_OUTPUT, longest_output=_LONGEST_OUTPUT
    )

    def run(setting: Setting, workload: Items[LoadRequest]) -> _Record:
        config = _engine_config(setting, model, num_stages, max_model_len)
        foretold = _Foretold(num_stages)
        with running_engine(config, _say_nothing, recorder=foretold) as running:
            return _run_load(running.engine, foretold, workload)

    at_once = [
        replace(r, arrival_s=0.0) for r in mixed_load(shape, _REQUESTS_TO_CALIBRATE, 1, ~seed)
    ]
    cost = run(settings[-1], at_once).dearest_cost()
    rate = load * capacity(shape, cost, _ROWS)
    workload = mixed_load(shape, requests, rate, seed)
    records = {setting: run(setting, workload) for setting in settings}
    errors = [error for record in records.values() for error in record.prediction_errors()]
    return {
        "workload": "mixed",
        "pipeline": model,
        "shape": f"{shape}, scaled down for {max_model_len} positions",
        "pp": num_stages,
        "seed": seed,
        "requests": requests,
        "load": load,
        "requests_per_s": rate,
        "cost_of_a_stage": asdict(cost),
        "prediction_error_median": float(np.median(errors)),
        **compare({setting: record.figures() for setting, record in records.items()}),
    }


def run_orders(*, model: str, num_stages: int, requests: int, max_model_len: int) -> dict[str, Any]:
    """The long load, with so many short prompts, under each order, each on a pipeline of its own;
    as JSON."""
    load = LongLoad(max_model_len, requests)
    results = []
    for contender in CONTENDERS:
        config = _engine_config(contender.setting, model, num_stages, max_model_len)
        with running_engine(config, _say_nothing, order=contender.order()) as running:
            results.append(_run_long(running.engine, load, contender))
    return {**load.as_json(results), "pipeline": model, "pp": num_stages}


def _engine_config(
    setting: Setting, model: str, num_stages: int, max_model_len: int
) -> EngineConfig:
    return EngineConfig(
        model=model,
        pipeline_parallel_size=num_stages,
        max_model_len=max_model_len,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        prefill_policy=setting.prefill_policy,
    )


def _run_long(engine: Engine, load: LongLoad, contender: Contender) -> LongFigures:
    """Run the load on an engine that has not run yet, until all but the streams ended."""
    # What steps cost is known to an engine that has been up for a while.
    for number, length in enumerate(_WARM_UP_PROMPTS, start=1):
        engine.add(_prompt(-number, length, engine.vocab_size), _endless(_WARM_UP_OUTPUT))
    while not engine.settled:
        engine.step()
    requests = load.requests()
    place_of: dict[int, int] = {}
    tokens_at: dict[int, list[float]] = {}
    missing = set(load.measured)
    started = time.monotonic()
    while missing:
        now = time.monotonic() - started
        while len(place_of) < len(requests) and requests[len(place_of)].arrival_s <= now:
            place = len(place_of)
            request = requests[place]
            prompt = _prompt(place, request.prompt_length, engine.vocab_size)
            place_of[engine.add(prompt, _endless(request.output_length))] = place
        arrivals = [request.arrival_s for request in requests[len(place_of) :]]
        deltas = engine.step(min(max(arrivals[0] - now, 0.0), 1.0) if arrivals else 1.0)
        for delta in deltas:
            place = place_of[delta.request_id]
            tokens_at.setdefault(place, []).append(time.monotonic() - started)
            if delta.finish_reason is not None:
                missing.discard(place)
    for number in place_of:
        engine.abort(number)
    while not engine.settled:
        engine.step()
    return load.figures(contender, tokens_at)


def _endless(output_length: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_length, ignore_eos=True)


def _say_nothing(message: str) -> None:
    """The bench says what it found, not how it loads."""


class _Step(NamedTuple):
    """A step that a stage reported: the seconds predicted before, and measured."""

    work: StepWork
    predicted_s: float
    measured_s: float


class _Foretold:
    """Each stage's steps that have rows, in order."""

    def __init__(self, num_stages: int) -> None:
        self.steps: list[list[_Step]] = [[] for _ in range(num_stages)]

    def on_plan(self, plan: Plan, num_microbatches: int) -> None:
        """Nothing to note: what a step takes is in its reports."""

    def on_result(self, result: Result) -> None:
        """Nothing to note."""

    def on_report(self, report: Report, work: StepWork, predicted_s: float) -> None:
        """Note it."""
        if work.tokens:
            measured_s = report.forward_s + report.sample_s
            self.steps[report.rank].append(_Step(work, predicted_s, measured_s))


@dataclass
class _Record:
    """What a load's run measured, in seconds since its start, up to the last arrival.

    foretold, ttft and costs are of the whole run. costs: of a step, by stage. empty_s: time without
    requests. steps: how many each stage had reported.
    """

    foretold: list[list[_Step]]
    costs: tuple[StepCost, ...] = ()
    ttft: list[float] = field(default_factory=list)
    empty_s: float = 0.0
    span_s: float = 0.0
    busy_s: float = 0.0
    steps: int = 0
    output_tokens: int = 0

    def prediction_errors(self) -> list[float]:
        """Of every stage's every step, relative to what was measured."""
        return [
            abs(step.predicted_s - step.measured_s) / step.measured_s
            for steps in self.foretold
            for step in steps
        ]

    def dearest_cost(self) -> StepCost:
        """Of the stage that took the most time."""
        times = [sum(step.measured_s for step in steps) for steps in self.foretold]
        return self.costs[times.index(max(times))]

    def figures(self) -> Figures:
        """Summed up."""
        stages = [steps[: self.steps] for steps in self.foretold]
        return figures(
            costs=[max(s.measured_s for s in step) for step in zip(*stages, strict=True)],
            busy_s=self.busy_s,
            present_s=self.span_s - self.empty_s,
            span_s=self.span_s,
            output_tokens=self.output_tokens,
            total_tokens=sum(step.work.tokens for step in stages[0]),
            ttft=self.ttft,
        )


def _run_load(engine: Engine, foretold: _Foretold, load: Items[LoadRequest]) -> _Record:
    """Run the load to its end on an engine that has not run yet, and has this recorder."""
    record = _Record(foretold.steps)
    waiting_since: dict[int, float] = {}
    arrived = 0
    output_tokens = 0
    started = time.monotonic()
    while arrived < len(load) or not engine.settled:
        now = time.monotonic() - started
        while arrived < len(load) and load[arrived].arrival_s <= now:
            request = load[arrived]
            arrived += 1
            prompt = _prompt(arrived, request.prompt_length, engine.vocab_size)
            number = engine.add(prompt, _endless(request.output_length))
            waiting_since[number] = request.arrival_s
            if arrived == len(load):
                record.span_s, record.output_tokens = now, output_tokens
                record.busy_s = fmean(sum(s.measured_s for s in steps) for steps in foretold.steps)
                record.steps = min(map(len, foretold.steps))
        until_next = load[arrived].arrival_s - now if arrived < len(load) else 1.0
        empty = engine.idle and arrived < len(load)
        deltas = engine.step(min(max(until_next, 0.0), 1.0))
        if empty:
            record.empty_s += time.monotonic() - started - now
        for delta in deltas:
            output_tokens += 1
            came = waiting_since.pop(delta.request_id, None)
            if came is not None:
                record.ttft.append(time.monotonic() - started - came)
    record.costs = engine.snapshot.costs
    return record


def _prompt(number: int, length: int, vocab_size: int) -> list[int]:
    """Tokens at random, so that no two prompts begin alike."""
    return random.Random(number).choices(range(vocab_size), k=length)
