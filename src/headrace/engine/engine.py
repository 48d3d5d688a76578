"""The engine's loop: fill the window with plans, take results, hand out text."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from msgspec import structs
from tokenizers import Tokenizer

from headrace.checks import check_type
from headrace.engine.detokenizer import Detokenizer, TextStream
from headrace.engine.microbatch_count import window_of
from headrace.engine.outputs import OutputDelta
from headrace.engine.pace import Pace
from headrace.engine.prepared import Preparation, Prepared, stage_sampling
from headrace.engine.recorder import Recorder
from headrace.engine.request import FinishReason, Request, Sequence
from headrace.engine.scheduler import Accepted, Scheduler
from headrace.engine.snapshot import EngineSnapshot, snapshot_of
from headrace.engine.stall import LINES_SHOWN, Scene, StallWatch
from headrace.engine.step_cost import StepCost
from headrace.engine.stop_strings import StopStrings
from headrace.engine.suspects import Suspects
from headrace.errors import UsageError
from headrace.protocol.fault import RankFault
from headrace.protocol.messages import Report, Result, Timeline, TokenLogprobs
from headrace.protocol.plan import Plan
from headrace.sampling_params import MAX_SEED, SamplingParams

# Odd constant of the 64-bit golden ratio (Steele, Lea, Flood 2014): spreads consecutive request
# numbers over the seed space.
_SEED_STRIDE = 0x9E3779B97F4A7C15
# For messages on their way when a stage was asked what it does.
_AFTERTHOUGHT_S = 0.1


class Pipeline(Protocol):
    """The ranks as the engine sees them."""

    def send(self, plan: Plan) -> None:
        """Give the plan to every rank, in order."""

    def receive(self, timeout_s: float) -> list[Result | Report]:
        """Messages that arrived, waiting up to timeout_s for the first; PipelineError if a
        stage failed."""

    def timelines(self, last: int, timeout_s: float) -> list[Timeline]:
        """What each stage did lately, on the engine's clock: at most `last` activities. Stages
        that do not answer in time are missing."""

    def signs_of_life(self) -> list[float]:
        """When each stage last sent anything, by stage, on the engine's clock."""


@dataclass(slots=True)
class _Text:
    """The text of a sequence as it comes, and what to look for in it."""

    stream: TextStream
    stops: StopStrings | None


@dataclass
class Engine:
    """Drives one pipeline. Not thread-safe: one caller adds, aborts and steps.

    vocab_size bounds token ids; seed is the base for requests without one; stall_timeout, in
    seconds, is how long nothing may come while a step is in flight, unless a stage computes.
    max_logprobs: of one position that a request may ask for, -1 for no limit. priorities: whether a
    request may have one other than 0. recorder: told of plans, results and reports. snapshot: the
    newest figures, for any thread: made before the engine waits for its stages, and when nothing is
    left to do.
    detokenizer: makes the texts that callers get; reader: of special tokens, too.
    """

    scheduler: Scheduler
    pipeline: Pipeline
    tokenizer: Tokenizer
    vocab_size: int
    pace: Pace
    seed: int
    stall_timeout: float
    max_logprobs: int
    priorities: bool = True
    clock: Callable[[], float] = time.monotonic
    recorder: Recorder | None = None
    snapshot: EngineSnapshot = field(init=False)
    detokenizer: Detokenizer = field(init=False)
    reader: Detokenizer = field(init=False)
    _preparation: Preparation = field(init=False)
    _requests: dict[int, list[Sequence]] = field(default_factory=dict, init=False)
    _texts: dict[Sequence, _Text] = field(default_factory=dict, init=False)
    _next_request: int = field(default=0, init=False)
    _stall: StallWatch = field(init=False)
    # What came and was not handed out yet: kept when the pipeline breaks in the middle of a step.
    _news: list[OutputDelta] = field(default_factory=list, init=False)
    _suspects: Suspects = field(default_factory=Suspects, init=False)
    # The request that runs with all others set aside.
    _apart: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.scheduler.cost = self.pace.cost
        self._stall = StallWatch(self.stall_timeout)
        self.detokenizer = Detokenizer(self.tokenizer)
        self.reader = Detokenizer(self.tokenizer, skip_special_tokens=False)
        eos = self.scheduler.config.eos_token_ids
        self._preparation = Preparation(self.tokenizer, self.vocab_size, eos, self.max_logprobs)
        self._take_snapshot()

    def prepare(self, params: SamplingParams) -> Prepared:
        """What add() takes, once for any number of prompts. Thread-safe: so that long lists hold up
        nobody. Raises UsageError for what the model or this engine does not have."""
        return self._preparation.prepare(params)

    def add(
        self,
        prompt: list[int],
        params: SamplingParams | Prepared,
        priority: int = 0,
        salt: bytes = b"",
    ) -> int:
        """Queue a request and return its id; smaller priorities run first.

        params: prepared, unless they are short. salt: only requests with the same find each other's
        blocks in the prefix cache. Raises UsageError, and queues nothing, if it could
        never run.
        """
        check_type("priority", priority, int)
        if priority and not self.priorities:
            raise UsageError(
                f"priority must be 0, not {priority}, under --scheduling-policy fcfs: choose "
                "--scheduling-policy priority"
            )
        self._preparation.check_tokens("prompt token", prompt)
        prepared = params if isinstance(params, Prepared) else self.prepare(params)
        params = prepared.params
        limit = self.scheduler.config.max_model_len
        max_outputs = self.scheduler.config.most_outputs(
            len(prompt), limit if params.max_tokens is None else params.max_tokens
        )
        request_id = self._next_request
        self._next_request += 1
        seed = params.seed
        if seed is None:
            seed = (self.seed + (request_id + 1) * _SEED_STRIDE) & MAX_SEED
        samplings = [stage_sampling(params, (seed + index) & MAX_SEED) for index in range(params.n)]
        # One completion's report on the prompt serves all.
        samplings[1:] = [structs.replace(each, prompt_logprobs=None) for each in samplings[1:]]
        # What completions have of their prompt is worked out once.
        begun = (self.detokenizer if params.skip_special_tokens else self.reader).stream(prompt)
        request = Request(
            id=request_id,
            prompt=prompt,
            params=params,
            max_outputs=max_outputs,
            priority=priority,
            salt=salt,
            rules=prepared.rules,
            stop_tokens=prepared.stop_tokens,
            report_size=prepared.report_size,
            own_report_size=prepared.own_report_size,
        )
        self._requests[request_id] = []
        for index, sampling in enumerate(samplings):
            sequence = Sequence(request, index, sampling)
            self.scheduler.add(sequence)
            if self._apart is not None:
                self.scheduler.set_aside(sequence)
            self._requests[request_id].append(sequence)
            stops = None
            if prepared.stops is not None:
                stops = StopStrings(
                    prepared.stops, params.include_stop_str_in_output, params.min_tokens
                )
            self._texts[sequence] = _Text(begun.copy(), stops)
        return request_id

    def abort(self, request_id: int) -> list[OutputDelta]:
        """End a request; one delta for each completion that had not ended."""
        deltas = self._end(request_id, "abort")
        self._take_snapshot()
        return deltas

    def lose(self, faults: Iterable[RankFault]) -> list[OutputDelta]:
        """The pipeline broke: what it had brought before, and the end of the request that ends a
        stage whenever it runs, if this tells which it is. faults: of the ranks that are lost.

        Its completions end with finish_reason "error", and stop_reason says why. restart() is next.
        """
        deltas, self._news = self._news, []
        for fault in faults:
            computed = self._computed_by(fault)
            blamed = self._suspects.died(computed, self._requests, outside=fault.outside)
            if blamed is not None:
                name = self.pace.ranks.name(fault.rank)
                deltas += self._end(blamed, "error", f"this request ended {name} again and again")
        return deltas

    def restart(self, pipeline: Pipeline, epoch: int) -> None:
        """Begin anew, as the next epoch; the one before has ended, somehow. No step() until the
        pipeline is ready.

        What was in flight is computed again from the tokens accepted, and nothing is handed out
        twice. epoch: not used before; messages of others are dropped. Learned costs stay.
        """
        self.pipeline = pipeline
        self.scheduler.new_epoch(epoch)
        self.pace.new_epoch()
        self._take_snapshot()

    def new_stages(self, num_blocks: int, priors: Iterable[StepCost]) -> None:
        """Before the first step of an epoch: its stages are others than those before.

        num_blocks: of their caches, enough for the longest sequence. priors: what a step is taken
        to cost each.
        """
        self.scheduler.config = replace(self.scheduler.config, num_blocks=num_blocks)
        self.scheduler.new_epoch(self.scheduler.epoch)
        self.pace.new_stages(tuple(priors))
        self.scheduler.cost = self.pace.cost
        self._take_snapshot()

    def is_running(self, request_id: int) -> bool:
        """Whether the request has a completion that has not ended."""
        return request_id in self._requests

    @property
    def num_requests(self) -> int:
        """Requests with a completion that has not ended."""
        return len(self._requests)

    @property
    def idle(self) -> bool:
        """Whether nothing waits, runs or is in flight; reports may still come."""
        return self.scheduler.idle

    @property
    def settled(self) -> bool:
        """Whether nothing is in flight and every stage has reported on every step."""
        return self.idle and self.pace.reported(self.scheduler.newest_step)

    def step(self, timeout_s: float = 1.0) -> list[OutputDelta]:
        """Send every plan the window has room for, then take what the stages answered."""
        self._stall.runs(self.clock())
        if self.pace.oldest_step is None:
            self._stall.progress(self.clock())
        while (plan := self._next_plan()) is not None:
            self.pace.planned(plan.step, self.scheduler.newest_work)
            if self.recorder is not None:
                self.recorder.on_plan(plan, self.scheduler.num_microbatches)
            self.pipeline.send(plan)
        self._take_snapshot()
        messages = self.pipeline.receive(timeout_s)
        self._stall.runs(self.clock(), timeout_s)
        self._take(messages)
        self._check_stall()
        if self.idle:
            self._take_snapshot()
        news, self._news = self._news, []
        return news

    def take_result(self, result: Result) -> list[OutputDelta]:
        """What the result of the oldest step in flight brought to whom."""
        now = self.clock()
        deltas = [self._to_output(entry, now) for entry in self.scheduler.take_result(result)]
        # Afterwards: time that this took is not the stages'.
        self._stall.progress(self.clock())
        if self.recorder is not None:
            self.recorder.on_result(result)
        return deltas

    def set_microbatches(self, count: int) -> None:
        """Have so many groups of sequences take turns, from the next plan on."""
        self.scheduler.set_microbatches(count, window_of(count, self.pace.ranks.num_stages))

    def _next_plan(self) -> Plan | None:
        if not self._suspects and self._apart is None:
            return self.scheduler.plan()
        if self._apart is not None or self._suspects.apart is not None:
            # One step at a time: if a stage dies of it, there is no other that it can be.
            if self.scheduler.steps_in_flight or self.pace.oldest_step is not None:
                return None
            self._run_apart(self._suspects.apart)
        return self.scheduler.plan()

    def _run_apart(self, request_id: int | None) -> None:
        """Set all but this request aside, or nobody."""
        if request_id == self._apart:
            return
        for number, sequences in self._requests.items():
            was_aside = self._apart is not None and number != self._apart
            aside = request_id is not None and number != request_id
            for sequence in sequences:
                if aside and not was_aside:
                    self.scheduler.set_aside(sequence)
                elif was_aside and not aside:
                    self.scheduler.take_back(sequence)
        self._apart = request_id

    def _computed_by(self, fault: RankFault) -> list[Sequence]:
        """Whose rows the rank may have been computing: those of all steps on which it has not
        reported, unless it said which, since its newest reports may be lost with it."""
        if fault.step is not None:
            steps = range(fault.step, fault.step + 1)
        else:
            due = self.pace.usage[fault.rank].newest_step + 1
            steps = range(due, self.scheduler.newest_step + 1)
        rows = [sequence for step in steps for sequence in self.scheduler.rows_of(step)]
        return list(dict.fromkeys(rows))

    def _end(
        self, request_id: int, reason: FinishReason, stop_reason: str | None = None
    ) -> list[OutputDelta]:
        """One delta for each completion of the request that had not ended."""
        deltas = []
        for sequence in list(self._requests.get(request_id, ())):
            self.scheduler.finish(sequence, reason, stop_reason)
            text = self._rest_of_text(self._texts[sequence])
            deltas.append(self._delta(sequence, None, text, self.clock()))
            self._forget(sequence)
        return deltas

    def _to_output(self, accepted: Accepted, now: float) -> OutputDelta:
        sequence, token = accepted.sequence, accepted.token
        text = "" if token is None else self._new_text(sequence, token)
        delta = self._delta(sequence, token, text, now, accepted.logprobs, accepted.prompt_logprobs)
        if self._suspects:
            self._suspects.got_on(sequence)
        if sequence.finish_reason is not None:
            self._forget(sequence)
        return delta

    def _new_text(self, sequence: Sequence, token: int) -> str:
        """The text that a token completed; ends the sequence if a stop string is in it."""
        text = self._texts[sequence]
        finished = sequence.finish_reason is not None
        by_token = sequence.finish_reason == "stop"
        if by_token and not sequence.request.params.include_stop_str_in_output:
            return self._rest_of_text(text)
        piece = text.stream.push(token)
        if finished:
            piece += text.stream.finish()
        if text.stops is None:
            return piece
        shown, hit = text.stops.push(piece, len(sequence.outputs))
        if hit is None:
            return shown + text.stops.finish() if finished else shown
        if not finished:
            self.scheduler.finish(sequence, "stop", hit)
        elif not by_token:
            # Its last token, by count, also completed the stop string.
            sequence.finish_reason, sequence.stop_reason = "stop", hit
        return shown

    def _rest_of_text(self, text: _Text) -> str:
        """What is held back when a sequence ends."""
        held = "" if text.stops is None else text.stops.finish()
        return held + text.stream.finish()

    def _delta(
        self,
        sequence: Sequence,
        token: int | None,
        text: str,
        now: float,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
    ) -> OutputDelta:
        return OutputDelta(
            sequence.request.id,
            sequence.index,
            token,
            text,
            sequence.finish_reason,
            sequence.stop_reason,
            logprobs,
            prompt_logprobs,
            sequence.cached_tokens or 0,
            now,
            sequence.queued_at,
            sequence.admitted_at,
        )

    def _forget(self, sequence: Sequence) -> None:
        del self._texts[sequence]
        siblings = self._requests[sequence.request.id]
        siblings.remove(sequence)
        self._suspects.ended(sequence, siblings)
        if not siblings:
            del self._requests[sequence.request.id]

    def _take(self, messages: Iterable[Result | Report]) -> None:
        for message in messages:
            if message.epoch != self.scheduler.epoch:
                # On its way when its pipeline ended.
                continue
            if isinstance(message, Report):
                self._take_report(message)
            else:
                self._news += self.take_result(message)

    def _take_report(self, report: Report) -> None:
        self._stall.progress(self.clock())
        if self.recorder is not None:
            self.recorder.on_report(report, *self.pace.foretold(report))
        if self.pace.take(report):
            self.scheduler.cost = self.pace.cost
            if self.pace.look_due(report.step):
                current, work = self.scheduler.num_microbatches, self.scheduler.decode_work
                count = self.pace.num_microbatches(report.step, current, work)
                if count != current:
                    self.set_microbatches(count)

    def _take_snapshot(self) -> None:
        self.snapshot = snapshot_of(self.scheduler, self.pace)

    def _check_stall(self) -> None:
        """Raises StallError if the stages are stuck."""
        if self.pace.oldest_step is None or not self._stall.due(self.clock()):
            return
        timelines = self.pipeline.timelines(LINES_SHOWN, self._stall.answer_s)
        self._stall.runs(self.clock(), self._stall.answer_s)
        # A step may have ended meanwhile, after which its stages wait with good reason.
        self._take(self.pipeline.receive(_AFTERTHOUGHT_S))
        # A step is over when every stage has reported on it.
        now, due = self.clock(), self.pace.oldest_step
        self._stall.runs(now, _AFTERTHOUGHT_S)
        if due is not None and self._stall.due(now):
            scene = Scene(
                now=now,
                due=due,
                newest=self.scheduler.newest_step,
                signs_of_life=self.pipeline.signs_of_life(),
                timelines={timeline.rank: timeline for timeline in timelines},
                ranks=self.pace.ranks,
            )
            self._stall.look(scene, self.pace.longest_s(), self.pace.is_new)
