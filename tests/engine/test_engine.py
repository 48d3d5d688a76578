from dataclasses import dataclass, field

import pytest
from tokenizers import Tokenizer, models

from headrace.engine.block_pool import block_key
from headrace.engine.detokenizer import TextStream
from headrace.engine.engine import Engine
from headrace.engine.limits import SchedulerConfig
from headrace.engine.outputs import OutputDelta, readable
from headrace.engine.pace import Pace
from headrace.engine.scheduler import Scheduler
from headrace.engine.step_cost import StepCost, StepWork
from headrace.errors import StallError, UsageError
from headrace.protocol.messages import Activity, Report, Result, Timeline, TokenLogprobs
from headrace.protocol.plan import Plan, Yield
from headrace.protocol.ranks import Ranks
from headrace.sampling_params import SamplingParams


@dataclass
class Pipeline:
    """Answers every plan at once with token 3, or stays silent.

    computing: what its stage says it does when asked, in forward since then; None for no answer.
    late: while the stages are asked, the answers arrive after all. reports: whether there are any.
    clock: moves while the engine waits in vain, and in the next wait by pause_s more.
    """

    silent: bool = False
    reports: bool = True
    late: bool = False
    computing: float | None = None
    asked: int = 0
    clock: "Clock | None" = None
    pause_s: float = 0.0
    plans: list[Plan] = field(default_factory=list)
    answers: list[Result | Report] = field(default_factory=list)

    def send(self, plan: Plan) -> None:
        self.plans.append(plan)
        tokens = [[3] if row.yields & Yield.TOKEN else [] for row in plan.rows]
        report = Report(
            plan.epoch, plan.step, 0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.25, None, [], 99
        )
        self.answers += [Result(plan.epoch, plan.step, tokens, []), *[report] * self.reports]

    def receive(self, timeout_s: float) -> list[Result | Report]:
        if self.clock is not None and (self.silent or not self.answers):
            self.clock.now += timeout_s + self.pause_s
            self.pause_s = 0.0
        if self.silent:
            return []
        answers, self.answers = self.answers, []
        return answers

    def timelines(self, last: int, timeout_s: float) -> list[Timeline]:
        self.asked += 1
        self.silent = not self.late
        if self.computing is None:
            return []
        return [Timeline(0, 0.0, [Activity("forward", 0, 0, 0, self.computing, None)])]

    def signs_of_life(self) -> list[float]:
        return [0.0]


def engine(pipeline: Pipeline, seed: int = 0, stall_timeout: float = 60.0) -> Engine:
    config = SchedulerConfig(
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        block_size=4,
        num_blocks=64,
        num_microbatches=1,
        window=3,
        eos_token_ids=frozenset(),
        prefix_caching=True,
        prefill_policy="even",
    )
    vocabulary = {f"t{n}": n for n in range(10)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    pace = Pace(Ranks(1), config.window)
    return Engine(Scheduler(config), pipeline, tokenizer, 10, pace, seed, stall_timeout, 5)


def seeds(base: int) -> list[int]:
    pipeline = Pipeline()
    target = engine(pipeline, seed=base)
    for _ in range(3):
        target.add([1], SamplingParams(max_tokens=1))
    target.add([1], SamplingParams(max_tokens=1, seed=77))
    target.step()
    admitted = [admission for plan in pipeline.plans for admission in plan.admitted]
    return [admission.sampling.seed for admission in admitted if admission.sampling]


def test_requests_without_a_seed_get_different_ones_that_follow_from_the_engines() -> None:
    assert len(set(seeds(5))) == 4
    assert seeds(5) == seeds(5)
    assert seeds(5)[:3] != seeds(6)[:3]
    assert seeds(5)[3] == seeds(6)[3] == 77


def test_a_request_runs_to_its_end_and_reports_add_up() -> None:
    target = engine(Pipeline())
    request = target.add([1, 2], SamplingParams(max_tokens=3))
    deltas = []
    while not target.scheduler.idle:
        deltas += target.step()
    assert [(d.request_id, d.token, d.finish_reason) for d in deltas] == [
        (request, 3, None),
        (request, 3, None),
        (request, 3, "length"),
    ]
    usage = target.snapshot.usage[0]
    assert usage.busy_s == 0.75 * (usage.newest_step + 1)
    assert usage.peak_memory_bytes == 99
    assert target.settled


def test_an_aborted_request_is_reported_once() -> None:
    target = engine(Pipeline())
    request = target.add([1], SamplingParams(max_tokens=30))
    target.step()
    ended = target.abort(request)
    assert [delta.finish_reason for delta in ended] == ["abort"]
    assert target.abort(request) == []
    assert not target._texts
    while not target.scheduler.idle:
        assert target.step() == []


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def waiting(pipeline: Pipeline) -> tuple[Engine, Clock]:
    """An engine with a step in flight, whose clock stands at 0."""
    clock = Clock()
    target = engine(pipeline)
    target.clock = pipeline.clock = clock
    target.add([1], SamplingParams(max_tokens=3))
    target.step(0.0)
    return target, clock


def test_a_silent_pipeline_is_an_error_that_names_the_step_and_what_was_seen() -> None:
    target, _ = waiting(Pipeline(silent=True))
    target.step(59.0)
    with pytest.raises(StallError, match=r"60.1 s at step 0: stage 0 .* no sign of life .* 60.1 s"):
        target.step()


def test_what_arrives_while_the_stages_are_asked_is_no_stall_and_not_lost() -> None:
    target, _ = waiting(Pipeline(silent=True, late=True))
    assert [delta.token for delta in target.step(60.0)] == [3, 3, 3]


def test_a_report_that_never_comes_is_a_stall_too() -> None:
    """A stage may stop after its last transfer: whoever waits for its reports must not wait on."""
    target, _ = waiting(Pipeline(reports=False))
    while not target.scheduler.idle:
        target.step()
    assert not target.settled
    with pytest.raises(StallError, match="stage 0"):
        target.step(61.0)


def test_a_stage_that_computes_is_asked_again_only_when_its_time_is_over() -> None:
    pipeline = Pipeline(silent=True, computing=50.0)
    target, clock = waiting(pipeline)
    target.pace._fits[0].add(StepWork(1, 1, 1), 0.1)
    target.step(60.0)
    target.step(109.9 - clock.now)
    assert pipeline.asked == 1
    with pytest.raises(StallError, match=r"stage 0 has been in forward of step 0 for 61.0 s"):
        target.step()


def test_work_that_was_never_measured_has_all_the_time_it_needs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipeline = Pipeline(silent=True, computing=0.0)
    target, clock = waiting(pipeline)
    target.pace._fits[0].add(StepWork(0, 0, 0), 0.1)
    while clock.now < 3600.0:
        target.step()
    assert "stage 0 has computed step 0 for 60 s: it is the first of its kind" in caplog.text
    pipeline.silent = False
    assert [delta.token for delta in target.step()] == [3, 3, 3]
    # Measured by now, so its like is judged.
    target.add([1], SamplingParams(max_tokens=1))
    pipeline.silent, pipeline.computing = True, clock.now
    target.pace._fits[0].add(StepWork(1, 1, 1), 0.5)
    with pytest.raises(StallError):
        target.step(60.0)


def test_a_pause_of_engine_and_stages_together_is_no_stall_but_one_of_a_stage_alone_is() -> None:
    pipeline = Pipeline(silent=True)
    target, clock = waiting(pipeline)
    target.step(59.0)
    for _ in range(3):
        # As a paused container: in the middle of a wait, and while the engine does something else.
        pipeline.pause_s = 3600.0
        target.step(0.1)
        clock.now += 3600.0
        target.step(0.1)
    assert pipeline.asked == 0
    with pytest.raises(StallError, match=r"stood still for 60.\d s"):
        target.step()


def test_a_report_is_a_sign_that_the_pipeline_gets_on() -> None:
    pipeline = Pipeline(silent=True)
    target, _ = waiting(pipeline)
    target.step(59.0)
    pipeline.silent, pipeline.answers = (
        False,
        [a for a in pipeline.answers if isinstance(a, Report)],
    )
    target.step()
    target.step(2.0)
    assert pipeline.asked == 0


@pytest.mark.parametrize("token", [-1, 10])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(UsageError, match=f"token {token} is not in the vocabulary"):
        engine(Pipeline()).add([1, token], SamplingParams())


def run(target: Engine) -> list[OutputDelta]:
    deltas = []
    while not target.scheduler.idle:
        deltas += target.step()
    return deltas


def test_a_stop_string_ends_a_sequence_whose_last_token_would_have_ended_it_anyway() -> None:
    target = engine(Pipeline())
    # Every token is "t3"; a blank is between them.
    target.add([1], SamplingParams(max_tokens=2, stop="3 t"))
    deltas = run(target)
    assert "".join(delta.text for delta in deltas) == " t"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "3 t")
    assert target.scheduler.free_blocks == 64


def test_what_was_held_back_for_a_stop_string_comes_at_the_end() -> None:
    target = engine(Pipeline())
    target.add([1], SamplingParams(max_tokens=2, stop="t3 t3 t3"))
    assert "".join(delta.text for delta in run(target)) == " t3 t3"


def test_an_abort_gives_the_text_that_was_held_back() -> None:
    target = engine(Pipeline())
    request = target.add([1], SamplingParams(max_tokens=30, stop="t3 t3 t3 t9"))
    text = "".join(delta.text for delta in target.step())
    text += "".join(delta.text for delta in target.abort(request))
    assert text
    assert set(text.split()) == {"t3"}


def test_n_completions_end_one_by_one_and_are_aborted_together() -> None:
    target = engine(Pipeline())
    request = target.add([1], SamplingParams(n=3, max_tokens=2))
    assert sorted(d.index for d in run(target) if d.finish_reason == "length") == [0, 1, 2]
    assert not target.is_running(request)
    request = target.add([1], SamplingParams(n=3, max_tokens=20))
    assert [d.index for d in target.abort(request)] == [0, 1, 2]


def test_a_prompt_is_looked_through_once_for_all_its_completions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = engine(Pipeline())
    # Eleven blocks of four, which are then in the prefix cache.
    prompt = [1, 2, 3, 4, 5] * 9
    target.add(prompt, SamplingParams(max_tokens=1))
    run(target)
    hashed, read = 0, 0
    stream = target.detokenizer.stream

    def counted(parent: bytes, tokens: list[int]) -> bytes:
        nonlocal hashed
        hashed += 1
        return block_key(parent, tokens)

    def watched(prompt: list[int]) -> TextStream:
        nonlocal read
        read += 1
        return stream(prompt)

    monkeypatch.setattr("headrace.engine.prefix_cache.block_key", counted)
    monkeypatch.setattr(target.detokenizer, "stream", watched)
    target.add(prompt, SamplingParams(n=8, max_tokens=3))
    deltas = run(target)
    assert {delta.cached_tokens for delta in deltas} == {44}
    assert (hashed, read) == (11, 1)
    for index in range(8):
        assert "".join(d.text for d in deltas if d.index == index) == " t3 t3 t3"


def test_costs_are_learnt_from_reports_and_given_to_the_scheduler() -> None:
    target = engine(Pipeline())
    target.add([1], SamplingParams(max_tokens=20))
    run(target)
    # Each step took 0.75 s by its reports.
    work = StepWork(1, 10, 1)
    assert target.snapshot.costs[0].seconds(work) == pytest.approx(0.75, rel=0.05)
    assert target.scheduler.cost.seconds(work) == pytest.approx(0.75, rel=0.05)
    assert target.pace.oldest_step is None


def test_nothing_is_queued_for_a_request_that_is_refused() -> None:
    target = engine(Pipeline())
    for params in (
        SamplingParams(n=2, logit_bias={10: 1.0}),
        SamplingParams(n=2, stop_token_ids=[10]),
        SamplingParams(n=2, logprobs=6),
        SamplingParams(n=2, prompt_logprobs=-1),
    ):
        with pytest.raises(UsageError):
            target.add([1], params)
    with pytest.raises(UsageError, match="64"):
        target.add([1] * 64, SamplingParams(n=2))
    assert target.scheduler.idle
    assert not target._requests


def test_a_token_among_equals_keeps_its_own_rank() -> None:
    # By id 3 comes before 5, but nothing is likelier than either.
    report = readable(TokenLogprobs([5, 3, 5], [-1.0, -1.0, -1.0], 1), str)
    assert {token: entry.rank for token, entry in report.items()} == {5: 1, 3: 1}


def test_first_come_first_served_takes_no_priority() -> None:
    target = engine(Pipeline())
    target.priorities = False
    with pytest.raises(
        UsageError, match=r"^priority must be 0, not -1, under --scheduling-policy fcfs"
    ):
        target.add([1], SamplingParams(), priority=-1)
    assert target.scheduler.idle
    target.add([1], SamplingParams(), priority=0)


@dataclass
class Notes:
    """A recorder. heard: what it was told, in order. predicted: seconds, of steps with rows."""

    heard: list[tuple[str, int]] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)

    def on_plan(self, plan: Plan, num_microbatches: int) -> None:
        self.heard.append(("plan", plan.step))
        assert num_microbatches == 1

    def on_result(self, result: Result) -> None:
        self.heard.append(("result", result.step))

    def on_report(self, report: Report, work: StepWork, predicted_s: float) -> None:
        self.heard.append(("report", report.step))
        if work.tokens:
            self.predicted.append(predicted_s)


def test_a_recorder_hears_of_every_plan_result_and_report_before_it_is_learnt_from() -> None:
    notes, pipeline = Notes(), Pipeline()
    target = engine(pipeline)
    target.recorder = notes
    target.add([1], SamplingParams(max_tokens=6))
    prior = target.snapshot.costs[0].seconds(StepWork(1, 1, 1))
    run(target)
    for kind in ("plan", "result", "report"):
        steps = [step for heard, step in notes.heard if heard == kind]
        assert steps == [plan.step for plan in pipeline.plans]
    # Each step took 0.75 s.
    assert notes.predicted[0] == prior < 0.1
    assert notes.predicted[-1] == pytest.approx(0.75, rel=0.1)


def test_a_snapshot_is_of_the_moment_before_the_engine_waits_and_stays_as_it_is() -> None:
    pipeline = Pipeline()
    target = engine(pipeline)
    idle = target.snapshot
    assert (idle.num_running, idle.num_waiting, idle.steps, idle.blocks_used) == (0, 0, 0, 0)
    for _ in range(5):
        target.add([1, 2], SamplingParams(max_tokens=3))
    seen = []
    receive = pipeline.receive

    def look(timeout_s: float) -> list[Result | Report]:
        seen.append(target.snapshot)
        return receive(timeout_s)

    pipeline.receive = look  # type: ignore[method-assign]
    run(target)
    first = seen[0]
    # Four slots for five; the window's three steps are on their way.
    assert (first.num_running, first.num_waiting, first.slots_used) == (4, 1, 4)
    assert (first.slots_total, first.blocks_total) == (4, 64)
    assert (first.steps_in_flight, first.usage[0].busy_s) == (first.steps, 0.0)
    last = target.snapshot
    assert (last.num_running, last.num_waiting, last.slots_used, last.blocks_used) == (0, 0, 0, 0)
    assert (last.steps, last.steps_in_flight) == (len(pipeline.plans), 0)
    assert last.usage[0].busy_s == 0.75 * last.steps
    assert idle.steps == 0


def test_an_abort_shows_at_once() -> None:
    target = engine(Pipeline(silent=True))
    requests = [target.add([1], SamplingParams(max_tokens=3)) for _ in range(6)]
    target.step(0.0)
    assert target.snapshot.num_waiting == 2
    target.abort(requests[-1])
    assert target.snapshot.num_waiting == 1


def test_after_a_restart_a_request_goes_on_and_what_was_learnt_stays() -> None:
    first, second = Pipeline(), Pipeline()
    target = engine(first)
    request = target.add([1], SamplingParams(max_tokens=6))
    ended = target.add([1], SamplingParams(max_tokens=6))
    deltas = target.step()
    target.abort(ended)
    first.silent = True
    target.step(0.0)
    busy_s = target.snapshot.usage[0].busy_s
    # Messages that were on their way when the first pipeline ended.
    second.answers = first.answers
    target.restart(second, epoch=1)
    assert not target.settled
    deltas += run(target)
    own = [delta for delta in deltas if delta.request_id == request]
    assert [delta.token for delta in own] == [3] * 6
    assert own[-1].finish_reason == "length"
    assert "".join(delta.text for delta in own) == " t3" * 6
    assert second.plans[0].epoch == 1
    assert target.snapshot.usage[0].busy_s > busy_s > 0
    assert target.snapshot.costs[0].seconds(StepWork(1, 10, 1)) == pytest.approx(0.75, rel=0.05)
    assert target.pace.oldest_step is None
    assert target.settled


def test_other_stages_with_less_cache_go_on_with_what_was_begun() -> None:
    first, second = Pipeline(), Pipeline()
    target = engine(first)
    requests = [target.add([1], SamplingParams(max_tokens=40)) for _ in range(4)]
    deltas = target.step()
    target.restart(second, epoch=1)
    prior = StepCost(fixed=1.0, per_token=0.0, per_position=0.0, per_sampled=0.0)
    # Room for one of them at its longest.
    target.new_stages(16, [prior])
    assert target.snapshot.blocks_total == 16
    assert target.snapshot.costs == (prior,)
    deltas += run(target)
    for request in requests:
        assert [d.token for d in deltas if d.request_id == request] == [3] * 40
    assert second.plans[0].epoch == 1
    assert target.snapshot.preemptions > 0
    assert target.settled
