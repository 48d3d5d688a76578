"""The engine's loop: fill the window with plans, take results, hand out text."""

import time
from dataclasses import dataclass, field
from typing import Protocol

from tokenizers import Tokenizer

from headrace.engine.outputs import OutputDelta, TextStream
from headrace.engine.request import Sequence
from headrace.engine.scheduler import AcceptedToken, Scheduler
from headrace.engine.stage_usage import StageUsage
from headrace.errors import PipelineError, UsageError
from headrace.protocol.messages import Report, Result
from headrace.protocol.plan import Plan
from headrace.protocol.sampling_params import MAX_SEED, SamplingParams

# Odd constant of the 64-bit golden ratio (Steele, Lea, Flood 2014): spreads consecutive request
# numbers over the seed space.
_SEED_STRIDE = 0x9E3779B97F4A7C15


class Pipeline(Protocol):
    """The ranks as the engine sees them."""

    def send(self, plan: Plan) -> None:
        """Give the plan to every rank, in order."""

    def receive(self, timeout_s: float) -> list[Result | Report]:
        """Messages that arrived, waiting up to timeout_s for the first; PipelineError if a
        stage failed."""


@dataclass
class _Running:
    sequence: Sequence
    text: TextStream


@dataclass
class Engine:
    """Drives one pipeline. Not thread-safe: one caller adds, aborts and steps.

    vocab_size bounds prompt tokens; seed is the base for requests without one; stall_timeout, in
    seconds, is how long a step in flight may go without any result.
    """

    scheduler: Scheduler
    pipeline: Pipeline
    tokenizer: Tokenizer
    vocab_size: int
    num_stages: int
    seed: int
    stall_timeout: float
    usage: list[StageUsage] = field(init=False)
    _running: dict[int, _Running] = field(default_factory=dict, init=False)
    _next_request: int = field(default=0, init=False)
    _last_progress: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.usage = [StageUsage() for _ in range(self.num_stages)]

    def add(self, prompt: list[int], params: SamplingParams) -> int:
        """Queue a request and return its id; raises UsageError if it could never run."""
        for token in prompt:
            if not 0 <= token < self.vocab_size:
                raise UsageError(
                    f"prompt token {token} is not in the vocabulary (0 to {self.vocab_size - 1})"
                )
        request_id = self._next_request
        seed = params.seed
        if seed is None:
            seed = (self.seed + (request_id + 1) * _SEED_STRIDE) & MAX_SEED
        sequence = Sequence(request_id, prompt, params, seed, params.max_tokens)
        self.scheduler.add(sequence)
        self._next_request += 1
        self._running[request_id] = _Running(sequence, TextStream(self.tokenizer))
        return request_id

    def abort(self, request_id: int) -> OutputDelta | None:
        """End a request; None if it is not running."""
        running = self._running.pop(request_id, None)
        if running is None:
            return None
        self.scheduler.abort(running.sequence)
        text = running.text.finish()
        return OutputDelta(request_id, None, text, "abort")

    @property
    def settled(self) -> bool:
        """Whether nothing is in flight and every stage has reported on every step."""
        newest = self.scheduler.newest_step
        return self.scheduler.idle and all(usage.newest_step >= newest for usage in self.usage)

    def step(self, timeout_s: float = 1.0) -> list[OutputDelta]:
        """Send every plan the window has room for, then take what the stages answered."""
        if self.scheduler.steps_in_flight == 0:
            self._last_progress = time.monotonic()
        while (plan := self.scheduler.plan()) is not None:
            self.pipeline.send(plan)
        deltas: list[OutputDelta] = []
        for message in self.pipeline.receive(timeout_s):
            if isinstance(message, Report):
                self.usage[message.stage].add(message)
            else:
                self._last_progress = time.monotonic()
                deltas += [self._to_output(a) for a in self.scheduler.take_result(message)]
        self._check_stall()
        return deltas

    def _to_output(self, accepted: AcceptedToken) -> OutputDelta:
        sequence = accepted.sequence
        running = self._running[sequence.request_id]
        text = running.text.push(accepted.token)
        if sequence.finished:
            text += running.text.finish()
            del self._running[sequence.request_id]
        return OutputDelta(sequence.request_id, accepted.token, text, sequence.finish_reason)

    def _check_stall(self) -> None:
        due = self.scheduler.oldest_step_in_flight
        if due is None or time.monotonic() - self._last_progress < self.stall_timeout:
            return
        # The first stage that is behind holds up the others.
        newest = [usage.newest_step for usage in self.usage]
        suspect = newest.index(min(newest))
        raise PipelineError(
            f"no result for step {due} in {self.stall_timeout:g} s: stage {suspect} has not "
            f"finished step {newest[suspect] + 1} (if a step may take that long, raise "
            "--stall-timeout)"
        )
