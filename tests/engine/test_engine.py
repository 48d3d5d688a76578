from dataclasses import dataclass, field

import pytest
from tokenizers import Tokenizer, models

from headrace.engine.engine import Engine
from headrace.engine.scheduler import Scheduler, SchedulerConfig
from headrace.errors import PipelineError, UsageError
from headrace.protocol.messages import Report, Result
from headrace.protocol.plan import Plan, Yield
from headrace.protocol.sampling_params import SamplingParams


@dataclass
class Pipeline:
    """Answers every plan at once with token 3, or stays silent."""

    silent: bool = False
    plans: list[Plan] = field(default_factory=list)
    answers: list[Result | Report] = field(default_factory=list)

    def send(self, plan: Plan) -> None:
        self.plans.append(plan)
        tokens = [[3] if row.yields & Yield.TOKEN else [] for row in plan.rows]
        report = Report(0, plan.step, 0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.25, 99)
        self.answers += [Result(0, plan.step, tokens, []), report]

    def receive(self, timeout_s: float) -> list[Result | Report]:
        answers, self.answers = self.answers, []
        return [] if self.silent else answers


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
    )
    vocabulary = {f"t{n}": n for n in range(10)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    return Engine(Scheduler(config), pipeline, tokenizer, 10, 1, seed, stall_timeout)


def seeds(base: int) -> list[int]:
    pipeline = Pipeline()
    target = engine(pipeline, seed=base)
    for _ in range(3):
        target.add([1], SamplingParams(max_tokens=1))
    target.add([1], SamplingParams(max_tokens=1, seed=77))
    target.step()
    return [admission.sampling.seed for plan in pipeline.plans for admission in plan.admitted]


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
    usage = target.usage[0]
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
    while not target.scheduler.idle:
        assert target.step() == []


def test_a_silent_pipeline_is_an_error_that_names_the_step_and_what_was_seen() -> None:
    target = engine(Pipeline(silent=True), stall_timeout=1e-9)
    target.add([1], SamplingParams(max_tokens=3))
    with pytest.raises(PipelineError, match=r"no result for step 0 .* stage 0 has not"):
        target.step()


@pytest.mark.parametrize("token", [-1, 10])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(UsageError, match=f"token {token} is not in the vocabulary"):
        engine(Pipeline()).add([1, token], SamplingParams())
