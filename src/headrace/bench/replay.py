"""Replays loads on the real scheduler and a virtual pipeline, under each policy or order."""

from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.bench.figures import Figures, Setting, compare, figures
from headrace.bench.long_load import CONTENDERS, LongLoad
from headrace.bench.mixed_load import LoadRequest, LoadShape, capacity, mixed_load
from headrace.bench.virtual_pipeline import StepTimes, VirtualPipeline
from headrace.engine.limits import SchedulerConfig
from headrace.engine.prefill_order import PrefillOrder
from headrace.engine.request import Request, Sequence
from headrace.engine.scheduler import Scheduler
from headrace.engine.step_cost import StepCost
from headrace.protocol.messages import Result
from headrace.protocol.plan import Plan, Sampling, row_samples, token_count
from headrace.sampling_params import SamplingParams

# A 7B model of 32 layers with grouped keys (8 heads of 128) in 16 bits, on cards with 900 GB/s and
# some 60 TFLOP/s in practice, if one card ran it all: 14 GB of weights read in 16 ms, and 2 ms of
# launching; 14 GFLOP a token. A position's keys and values, 128 KiB, are read in 150 ns by a decode
# row; in a chunk many tokens share the reading, and the 0.5 MFLOP count, 9 ns. The one coefficient
# lies between: too low for decode rows, too high for chunks, by about a tenth of a step each.
_WHOLE_MODEL = StepCost(fixed=18e-3, per_token=232e-6, per_position=40e-9, per_sampled=10e-6)
# 8 GiB of cache a stage at pp=4: 256 Ki positions.
_NUM_BLOCKS, _BLOCK_SIZE = 16384, 16
_MAX_NUM_SEQS = 256
_TOKEN = 1
# SmolLM2-135M in bfloat16 if one slow core ran it all, as the engine fits it: long prompts are made
# of attention.
_SMALL_MODEL = StepCost(fixed=38e-3, per_token=420e-6, per_position=1.15e-6, per_sampled=1.5e-3)


def replay_policies(
    settings: Items[Setting], *, num_stages: int, requests: int, load: float, seed: int
) -> dict[str, Any]:
    """The same load under each setting, with a microbatch a stage; as JSON.

    load: the arrival rate over what a pipeline without bubbles could serve with all slots taken.
    """
    shape = LoadShape()
    cost = _of_a_stage(_WHOLE_MODEL, num_stages)
    rate = load * capacity(shape, cost, _MAX_NUM_SEQS // num_stages)
    workload = mixed_load(shape, requests, rate, seed)
    results = {}
    for setting in settings:
        config = _scheduler_config(setting, num_stages, shape.max_positions)
        results[setting] = replay(workload, config, cost, num_stages).figures()
    return {
        "workload": "mixed",
        "pipeline": "virtual",
        "shape": str(shape),
        "pp": num_stages,
        "seed": seed,
        "requests": requests,
        "load": load,
        "requests_per_s": rate,
        "max_num_seqs": _MAX_NUM_SEQS,
        "cost_of_a_stage": asdict(cost),
        **compare(results),
    }


def replay_orders(*, num_stages: int, requests: int, max_model_len: int) -> dict[str, Any]:
    """The long load, with so many short prompts, under each order; as JSON."""
    load = LongLoad(max_model_len, requests)
    cost = _of_a_stage(_SMALL_MODEL, num_stages)
    results = []
    for contender in CONTENDERS:
        config = _scheduler_config(contender.setting, num_stages, max_model_len)
        record = replay(load.requests(), config, cost, num_stages, contender.order())
        results.append(load.figures(contender, record.tokens_at))
    return {
        **load.as_json(results),
        "pipeline": "virtual",
        "pp": num_stages,
        "cost_of_a_stage": asdict(cost),
    }


def _scheduler_config(setting: Setting, num_stages: int, max_model_len: int) -> SchedulerConfig:
    """With a microbatch a stage."""
    return SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=_MAX_NUM_SEQS,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        block_size=_BLOCK_SIZE,
        num_blocks=_NUM_BLOCKS,
        num_microbatches=num_stages,
        window=num_stages + 2,
        eos_token_ids=frozenset(),
        prefix_caching=False,
        prefill_policy=setting.prefill_policy,
        num_stages=num_stages,
    )


def _of_a_stage(whole: StepCost, num_stages: int) -> StepCost:
    """Sampling is the last stage's alone, but the dearest stage sets the pace."""
    return StepCost(
        fixed=whole.fixed / num_stages,
        per_token=whole.per_token / num_stages,
        per_position=whole.per_position / num_stages,
        per_sampled=whole.per_sampled,
    )


@dataclass
class Replay:
    """What happened, in virtual seconds. tokens_at: when each request's tokens were accepted.
    outputs: (when, how many) of all."""

    load: Items[LoadRequest]
    num_stages: int
    tokens_at: dict[int, list[float]] = field(default_factory=dict)
    steps: list[StepTimes] = field(default_factory=list)
    inputs: list[tuple[float, int]] = field(default_factory=list)
    outputs: list[tuple[float, int]] = field(default_factory=list)

    def figures(self) -> Figures:
        """Summed up between the first arrival and the last."""
        first, last = self.load[0].arrival_s, self.load[-1].arrival_s
        stays = [(r.arrival_s, self.tokens_at[n][-1]) for n, r in enumerate(self.load)]
        busy = sum(
            _overlap(began, began + step.cost, first, last)
            for step in self.steps
            for began in step.began
        )
        output_tokens = sum(count for at, count in self.outputs if at <= last)
        input_tokens = sum(count for at, count in self.inputs if at <= last)
        return figures(
            costs=[step.cost for step in self.steps if step.began[0] <= last],
            busy_s=busy / self.num_stages,
            present_s=_length_of_union(stays, first, last),
            span_s=last - first,
            output_tokens=output_tokens,
            total_tokens=input_tokens,
            ttft=[self.tokens_at[n][0] - r.arrival_s for n, r in enumerate(self.load)],
        )


def replay(
    load: Items[LoadRequest],
    config: SchedulerConfig,
    cost: StepCost,
    num_stages: int,
    order: PrefillOrder | None = None,
) -> Replay:
    """Run the load to its end. The scheduler plans whenever its window has room, at once.

    order: of prefill; None for the scheduler's own.
    """
    now = 0.0
    scheduler = Scheduler(config, clock=lambda: now, order=order)
    scheduler.cost = cost
    pipeline = VirtualPipeline(num_stages, cost)
    plans: dict[int, Plan] = {}
    record = Replay(load, num_stages)
    arrived = 0
    while arrived < len(load) or not scheduler.idle:
        result_at = pipeline.next_result_at
        if arrived < len(load) and (result_at is None or load[arrived].arrival_s <= result_at):
            now = load[arrived].arrival_s
            scheduler.add(_sequence(arrived, load[arrived]))
            arrived += 1
        else:
            assert result_at is not None, "requests are left and nothing is on its way"
            now = result_at
            step = pipeline.take_result()
            _take_result(scheduler, plans.pop(step.step), step, record)
        while (plan := scheduler.plan()) is not None:
            plans[plan.step] = plan
            pipeline.send(now, plan, scheduler.newest_work)
    return record


def _sequence(number: int, request: LoadRequest) -> Sequence:
    params = SamplingParams(max_tokens=request.output_length, ignore_eos=True)
    prompt = [_TOKEN] * request.prompt_length
    asked = Request(number, prompt, params, request.output_length)
    return Sequence(asked, 0, Sampling(seed=0))


def _take_result(scheduler: Scheduler, plan: Plan, step: StepTimes, record: Replay) -> None:
    tokens = [[_TOKEN] if row_samples(row) else [] for row in plan.rows]
    accepted = scheduler.take_result(Result(plan.epoch, plan.step, tokens, []))
    for entry in accepted:
        record.tokens_at.setdefault(entry.sequence.request.id, []).append(step.ended)
    if plan.rows:
        record.steps.append(step)
        record.inputs.append((step.ended, token_count(plan)))
        record.outputs.append((step.ended, len(accepted)))


def _overlap(begin: float, end: float, first: float, last: float) -> float:
    return max(0.0, min(end, last) - max(begin, first))


def _length_of_union(intervals: list[tuple[float, float]], first: float, last: float) -> float:
    """Length of the union within [first, last] of intervals ordered by their begin."""
    total, covered = 0.0, first
    for begin, end in intervals:
        total += _overlap(max(begin, covered), end, first, last)
        covered = max(covered, end)
    return total
