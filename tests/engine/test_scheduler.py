import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.engine.request import Sequence
from headrace.engine.scheduler import Scheduler, SchedulerConfig
from headrace.errors import PipelineError, UsageError
from headrace.protocol.messages import Result
from headrace.protocol.plan import Plan, TokenRef, Yield
from headrace.protocol.sampling_params import SamplingParams

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, SEQS, BUDGET = 4, 20, 40, 4, 7
EOS = 1


def scheduler(microbatches: int = 2, window: int = 4) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            MAX_LEN, SEQS, BUDGET, BLOCK_SIZE, NUM_BLOCKS, microbatches, window, frozenset({EOS})
        )
    )


def sequence(number: int, prompt: int, outputs: int, ignore_eos: bool = False) -> Sequence:
    params = SamplingParams(max_tokens=outputs, ignore_eos=ignore_eos)
    return Sequence(number, [2] * prompt, params, 0, outputs)


def result_of(plan: Plan, token: int = 5) -> Result:
    tokens = [[token] if row.yields is Yield.TOKEN else [] for row in plan.rows]
    return Result(plan.epoch, plan.step, tokens)


class Load(RuleBasedStateMachine):
    """Any order of arrivals, plans, results and aborts, watched from the ranks' side."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler()
        self.sequences: list[Sequence] = []
        self.in_flight: list[Plan] = []
        self.next_step = 0
        self.newest_result = -1
        # What a rank knows: per slot its blocks and next position, and what is free for plan n.
        self.blocks_of: dict[int, list[int]] = {}
        self.position_of: dict[int, int] = {}

    @rule(prompt=st.integers(1, 25), outputs=st.integers(1, 15), ignore=st.booleans())
    def add(self, prompt: int, outputs: int, ignore: bool) -> None:
        self.sequences.append(sequence(len(self.sequences), prompt, outputs, ignore))
        self.scheduler.add(self.sequences[-1])

    @rule()
    def plan(self) -> None:
        plan = self.scheduler.plan()
        if plan is None:
            return
        assert plan.step == self.next_step
        assert plan.step - self.newest_result <= 4
        self.next_step += 1
        self.in_flight.append(plan)
        self.apply(plan)

    def apply(self, plan: Plan) -> None:
        """What every rank does with a plan, checked."""
        assert plan.rows or plan.released
        assert sum(len(row.inputs) for row in plan.rows) <= BUDGET
        slots = [row.slot for row in plan.rows]
        assert len(set(slots)) == len(slots), "a slot twice in a step"
        for admission in plan.admitted:
            assert admission.slot not in self.blocks_of, "slot given out while taken"
            assert 0 <= admission.slot < SEQS
            self.blocks_of[admission.slot], self.position_of[admission.slot] = [], 0
        for appended in plan.appended:
            taken = {b for blocks in self.blocks_of.values() for b in blocks}
            assert not taken & set(appended.blocks), "block given out while taken"
            self.blocks_of[appended.slot] += appended.blocks
        for row in plan.rows:
            position = self.position_of[row.slot]
            refers = isinstance(row.inputs[0], TokenRef)
            assert row.start == (None if refers else position)
            position += len(row.inputs)
            assert position <= len(self.blocks_of[row.slot]) * BLOCK_SIZE
            self.position_of[row.slot] = position
            for token in row.inputs:
                if isinstance(token, TokenRef):
                    assert self.newest_result < token.step < plan.step
        for slot in plan.released:
            del self.blocks_of[slot], self.position_of[slot]

    @precondition(lambda self: self.in_flight)
    @rule(token=st.sampled_from([EOS, 5, 6]))
    def result(self, token: int) -> None:
        plan = self.in_flight.pop(0)
        self.newest_result = plan.step
        for accepted in self.scheduler.take_result(result_of(plan, token)):
            assert len(accepted.sequence.outputs) <= accepted.sequence.max_outputs

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.abort(data.draw(st.sampled_from(self.sequences)))

    @invariant()
    def finished_sequences_ended_for_a_reason(self) -> None:
        for s in self.sequences:
            if s.finish_reason == "stop":
                assert s.outputs[-1] == EOS
                assert not s.params.ignore_eos
            if s.finish_reason == "length":
                assert len(s.outputs) == s.max_outputs

    def teardown(self) -> None:
        """Every request ends, and everything comes back."""
        for _ in range(10_000):
            if self.scheduler.idle:
                break
            self.plan()
            if self.in_flight:
                self.result(5)
        assert self.scheduler.idle
        assert all(s.finished for s in self.sequences)
        assert self.scheduler.free_blocks == NUM_BLOCKS
        assert self.blocks_of == {}


TestLoad = Load.TestCase
TestLoad.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_a_lone_sequence_is_planned_ahead_by_references() -> None:
    engine = scheduler(microbatches=2, window=4)
    engine.add(sequence(0, prompt=3, outputs=10))
    plans = [engine.plan() for _ in range(5)]
    assert plans[4] is None, "the window is full"
    ahead = [plan for plan in plans if plan is not None]
    assert [plan.step for plan in ahead] == [0, 1, 2, 3]
    assert [plan.rows[0].inputs for plan in ahead[1:]] == [
        [TokenRef(0, 0)],
        [TokenRef(1, 0)],
        [TokenRef(2, 0)],
    ]
    assert all(plan.rows[0].start is None for plan in ahead[1:])


def test_a_token_the_engine_has_is_sent_as_an_id() -> None:
    engine = scheduler(window=1)
    engine.add(sequence(0, prompt=3, outputs=10))
    first = engine.plan()
    assert first is not None
    engine.take_result(result_of(first, token=9))
    second = engine.plan()
    assert second is not None
    assert second.rows[0].inputs == [9]
    assert second.rows[0].start == 3


def test_consecutive_chunks_of_a_long_prompt_go_in_consecutive_steps() -> None:
    engine = scheduler()
    engine.add(sequence(0, prompt=17, outputs=2))
    plans = [engine.plan() for _ in range(3)]
    chunks = [(p.rows[0].start, len(p.rows[0].inputs), p.rows[0].yields) for p in plans if p]
    assert chunks == [(0, 7, Yield.NOTHING), (7, 7, Yield.NOTHING), (14, 3, Yield.TOKEN)]


def test_sequences_spread_evenly_over_the_microbatches() -> None:
    engine = scheduler(microbatches=2, window=8)
    for number in range(4):
        engine.add(sequence(number, prompt=1, outputs=15, ignore_eos=True))
    sizes = [len(plan.rows) for _ in range(8) if (plan := engine.plan())]
    assert sizes[0] == 4, "all prompts fit one step"
    assert set(sizes[1:]) == {2}


def test_groups_that_endings_left_uneven_are_evened_out() -> None:
    engine = scheduler(microbatches=2, window=8)
    everyone = [sequence(n, prompt=1, outputs=15, ignore_eos=True) for n in range(4)]
    for one in everyone:
        engine.add(one)
    first = engine.plan()
    assert first is not None
    engine.take_result(result_of(first))
    together = [one for one in everyone if one.microbatch == 0]
    for one in everyone:
        if one not in together:
            engine.abort(one)
    sizes = [len(plan.rows) for _ in range(6) if (plan := engine.plan())]
    assert sizes == [1] * 6


def test_length_limits_are_counted_when_planning() -> None:
    engine = scheduler(window=8)
    engine.add(sequence(0, prompt=2, outputs=3))
    rows = [plan for _ in range(8) if (plan := engine.plan())]
    assert len(rows) == 3, "no row beyond the third token"


def test_surplus_tokens_after_a_stop_reach_nobody() -> None:
    engine = scheduler(window=4)
    one = sequence(0, prompt=2, outputs=10)
    engine.add(one)
    plans = [plan for _ in range(4) if (plan := engine.plan())]
    assert len(engine.take_result(result_of(plans[0], EOS))) == 1
    for plan in plans[1:]:
        assert engine.take_result(result_of(plan, 9)) == []
    assert one.outputs == [EOS]
    last = engine.plan()
    assert last is not None
    assert (last.rows, last.released) == ([], [0])
    engine.take_result(result_of(last))
    assert engine.idle


def test_a_result_out_of_turn_is_an_error_at_once() -> None:
    engine = scheduler()
    engine.add(sequence(0, prompt=2, outputs=10))
    first, second = engine.plan(), engine.plan()
    assert first is not None
    assert second is not None
    with pytest.raises(PipelineError, match="due was step 0"):
        engine.take_result(result_of(second))
    engine.take_result(result_of(first))
    with pytest.raises(PipelineError, match="due was step 1"):
        engine.take_result(result_of(first))


def test_a_result_that_does_not_fit_its_plan_is_an_error_at_once() -> None:
    engine = scheduler()
    engine.add(sequence(0, prompt=2, outputs=10))
    engine.plan()
    with pytest.raises(PipelineError, match="rows"):
        engine.take_result(Result(0, 0, [[1], [2]]))
    engine = scheduler()
    engine.add(sequence(0, prompt=2, outputs=10))
    engine.plan()
    with pytest.raises(PipelineError, match="tokens"):
        engine.take_result(Result(0, 0, [[]]))


@pytest.mark.parametrize(
    ("prompt", "outputs", "reason"),
    [(0, 1, "empty"), (MAX_LEN, 1, "--max-model-len"), (MAX_LEN + 5, 1, "--max-model-len")],
)
def test_a_request_that_could_never_run_is_refused(prompt: int, outputs: int, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        scheduler().add(sequence(0, prompt, outputs))


def test_a_request_larger_than_the_whole_cache_is_refused() -> None:
    engine = Scheduler(SchedulerConfig(MAX_LEN, SEQS, BUDGET, 4, 5, 2, 4, frozenset()))
    with pytest.raises(UsageError, match="kv-cache-memory"):
        engine.add(sequence(0, prompt=10, outputs=20))
