"""What one plan costs the engine: a real engine and tokenizer on a pipeline that takes no time."""

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.locate import locate_model
from headrace.checkpoint.tokenizer import tokenizer_of_gguf
from headrace.engine.engine import Engine
from headrace.engine.limits import SchedulerConfig
from headrace.engine.pace import Pace
from headrace.engine.scheduler import Scheduler
from headrace.engine.step_cost import StepWork
from headrace.protocol import codec
from headrace.protocol.messages import Report, Result, Timeline
from headrace.protocol.plan import Plan, row_samples
from headrace.protocol.ranks import Ranks
from headrace.sampling_params import SamplingParams

_MODEL = "smollm2"
_BLOCK_SIZE = 16
_WINDOW = 3
_CHUNK = 4096
# A multiplicative hash (Knuth): consecutive numbers far apart in 32 bits.
_SPREAD, _BITS = 2654435761, 32


@dataclass(frozen=True)
class EngineCost:
    """Times in microseconds a plan, in which every running sequence has a decode row.

    plan: making it. encode: its bytes, of which there are plan_bytes at the median. result: taking
    the result in from its bytes, detokenizing, looking for stops. total: all that the engine does
    for the step, its bookkeeping and the stage's report included.
    """

    running: int
    context_len: int
    plan_us_p50: float
    plan_us_p99: float
    encode_us_p50: float
    result_us_p50: float
    total_us_p50: float
    plan_bytes: int


def engine_cost(running: int, context_len: int, steps: int = 300) -> EngineCost:
    """Measure `steps` plans of `running` sequences that begin with context_len positions each."""
    tokenizer = tokenizer_of_gguf(read_gguf(locate_model(_MODEL).path)).core
    vocab_size = tokenizer.get_vocab_size()
    # Sequences decode already while others are prefilled, and none may end before the last plan.
    step_tokens = running + _CHUNK
    prefill_steps = -(-running * context_len // _CHUNK)
    max_model_len = context_len + prefill_steps + steps + 2 * _WINDOW + 2
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=running,
            max_num_batched_tokens=step_tokens,
            block_size=_BLOCK_SIZE,
            num_blocks=running * (-(-max_model_len // _BLOCK_SIZE)),
            num_microbatches=1,
            window=_WINDOW,
            eos_token_ids=frozenset({0}),
            prefix_caching=True,
            prefill_policy="budget",
        )
    )
    stopwatch = _Stopwatch()
    pipeline = _InstantPipeline(vocab_size, stopwatch)
    engine = Engine(
        scheduler=scheduler,
        pipeline=pipeline,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        pace=Pace(Ranks(1), _WINDOW),
        seed=0,
        stall_timeout=60.0,
        max_logprobs=20,
        recorder=stopwatch,
    )
    params = SamplingParams(max_tokens=max_model_len, stop=["\n\nUser:"], stop_token_ids=[0])
    for number in range(running):
        engine.add([_hash(number, n, vocab_size) for n in range(context_len)], params)
    while pipeline.newest_rows < running or pipeline.newest_tokens > running:
        engine.step()
    stopwatch.start_measuring()
    pipeline.start_measuring()
    total = []
    for _ in range(steps):
        pipeline.answering_s = 0.0
        began = stopwatch.since = perf_counter()
        engine.step()
        total.append(perf_counter() - began - pipeline.answering_s)
        assert pipeline.newest_rows == running, "a sequence ended before the last plan"
    return EngineCost(
        running=running,
        context_len=context_len,
        plan_us_p50=_microseconds(stopwatch.plan_s, 0.5),
        plan_us_p99=_microseconds(stopwatch.plan_s, 0.99),
        encode_us_p50=_microseconds(pipeline.encode_s, 0.5),
        result_us_p50=_microseconds(stopwatch.result_s, 0.5)
        + _microseconds(pipeline.decode_s, 0.5),
        total_us_p50=_microseconds(total, 0.5),
        plan_bytes=int(np.median(pipeline.plan_bytes)),
    )


def _microseconds(seconds: list[float], quantile: float) -> float:
    return round(float(np.quantile(seconds, quantile)) * 1e6, 1)


def _hash(sequence: int, position: int, vocab_size: int) -> int:
    """A token that is never 0, which ends a sequence, and is n about as often as 1/n (Zipf): small
    numbers are the frequent tokens of a byte-pair vocabulary, and texts repeat them as much."""
    spread = (sequence * 7919 + position) * _SPREAD % 2**_BITS / 2**_BITS
    return int((vocab_size - 1) ** spread)


@dataclass
class _Stopwatch:
    """Notes how long the engine took to make a plan, or to take a result in, after it was told to
    begin or came back from the pipeline: at `since`."""

    since: float = 0.0
    plan_s: list[float] = field(default_factory=list, init=False)
    result_s: list[float] = field(default_factory=list, init=False)

    def start_measuring(self) -> None:
        """Forget what was measured so far."""
        self.plan_s.clear()
        self.result_s.clear()

    def on_plan(self, plan: Plan, num_microbatches: int) -> None:
        """A plan is made."""
        self.plan_s.append(perf_counter() - self.since)

    def on_result(self, result: Result) -> None:
        """A result is taken in."""
        self.result_s.append(perf_counter() - self.since)

    def on_report(self, report: Report, work: StepWork, predicted_s: float) -> None:
        """Part of the total alone."""


@dataclass
class _InstantPipeline:
    """Has each result ready at once, and hands out one a call, so that the window stays full.

    answering_s: time spent on being a pipeline, which is not the engine's.
    """

    vocab_size: int
    stopwatch: _Stopwatch
    encode_s: list[float] = field(default_factory=list, init=False)
    decode_s: list[float] = field(default_factory=list, init=False)
    plan_bytes: list[int] = field(default_factory=list, init=False)
    answering_s: float = field(default=0.0, init=False)
    newest_rows: int = field(default=0, init=False)
    newest_tokens: int = field(default=0, init=False)
    _answers: deque[tuple[bytes, bytes]] = field(default_factory=deque, init=False)

    def start_measuring(self) -> None:
        """Forget what was measured so far."""
        self.encode_s.clear()
        self.decode_s.clear()
        self.plan_bytes.clear()

    def send(self, plan: Plan) -> None:
        began = perf_counter()
        data = codec.encode(plan)
        encoded = perf_counter()
        self.encode_s.append(encoded - began)
        self.plan_bytes.append(len(data))
        self.newest_rows = len(plan.rows)
        self.newest_tokens = sum(len(row.inputs) for row in plan.rows)
        tokens = [
            [_hash(row.slot, plan.step, self.vocab_size)] if row_samples(row) else []
            for row in plan.rows
        ]
        report = Report(
            plan.epoch, plan.step, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.001, None, [], 0
        )
        result = codec.encode(Result(plan.epoch, plan.step, tokens, []))
        self._answers.append((result, codec.encode(report)))
        self.stopwatch.since = perf_counter()
        self.answering_s += self.stopwatch.since - encoded

    def receive(self, timeout_s: float) -> list[Result | Report]:
        messages: list[Result | Report] = []
        began = perf_counter()
        for data in self._answers.popleft():
            message = codec.decode_from_rank(data)
            assert isinstance(message, Result | Report)
            messages.append(message)
        self.stopwatch.since = perf_counter()
        self.decode_s.append(self.stopwatch.since - began)
        return messages

    def timelines(self, last: int, timeout_s: float) -> list[Timeline]:
        return []

    def signs_of_life(self) -> list[float]:
        return [0.0]
