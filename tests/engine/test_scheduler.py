from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from headrace.engine.limits import SchedulerConfig
from headrace.engine.plan_draft import MOST_REPORTED
from headrace.engine.prefill_order import FirstCome, PrefillOrder
from headrace.engine.prepared import stage_sampling
from headrace.engine.request import Request, Sequence
from headrace.engine.scheduler import Scheduler
from headrace.engine.step_cost import StepCost
from headrace.errors import PipelineError, UsageError
from headrace.protocol.messages import Result, RowLogprobs, TokenLogprobs
from headrace.protocol.plan import Plan, TokenRef, Yield
from headrace.sampling_params import SamplingParams

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, SEQS, BUDGET = 4, 11, 40, 4, 7
EOS = 1


def scheduler(order: PrefillOrder | None = None, **changes: Any) -> Scheduler:
    settings: dict[str, Any] = {
        "max_model_len": MAX_LEN,
        "max_num_seqs": SEQS,
        "max_num_batched_tokens": BUDGET,
        "block_size": BLOCK_SIZE,
        "num_blocks": 40,
        "num_microbatches": 2,
        "window": 4,
        "eos_token_ids": frozenset({EOS}),
        "prefix_caching": True,
        "prefill_policy": "budget",
    }
    return Scheduler(SchedulerConfig(**{**settings, **changes}), order=order)


def sequence(
    number: int,
    prompt: int | list[int],
    outputs: int,
    priority: int = 0,
    salt: bytes = b"",
    own_report_size: int = 0,
    **params: Any,
) -> Sequence:
    tokens = [100 + number] * prompt if isinstance(prompt, int) else prompt
    asked = SamplingParams(max_tokens=outputs, **params)
    request = Request(
        number,
        tokens,
        asked,
        # Prompts beyond MAX_LEN are for schedulers that take them.
        min(outputs, MAX_LEN - len(tokens)) if len(tokens) < MAX_LEN else outputs,
        priority,
        salt,
        stop_tokens=frozenset(asked.stop_token_ids),
        own_report_size=own_report_size,
    )
    return Sequence(request, 0, stage_sampling(asked, number))


def group_of(sequence: Sequence) -> int | None:
    """The microbatch that it belongs to, if it decodes."""
    return None if sequence.run is None else sequence.run.microbatch


def result_of(plan: Plan, token: int = 5) -> Result:
    tokens = [[token] if row.yields & Yield.TOKEN else [] for row in plan.rows]
    return Result(plan.epoch, plan.step, tokens, [])


class Load(RuleBasedStateMachine):
    """Any order of arrivals, plans, results and aborts, watched from the ranks' side.

    The cache is so small that preemption is common, and prompts share beginnings.
    """

    @initialize(
        microbatches=st.integers(1, 3),
        ahead=st.integers(1, 3),
        caching=st.booleans(),
        policy=st.sampled_from(["even", "budget"]),
        first_come=st.booleans(),
    )
    def start(
        self, microbatches: int, ahead: int, caching: bool, policy: str, first_come: bool
    ) -> None:
        self.window = microbatches + ahead
        self.scheduler = scheduler(
            FirstCome() if first_come else None,
            num_blocks=NUM_BLOCKS,
            num_microbatches=microbatches,
            window=self.window,
            prefix_caching=caching,
            prefill_policy=policy,
        )
        self.sequences: list[Sequence] = []
        self.forget()

    def forget(self) -> None:
        """Begin as the ranks of an epoch do."""
        self.in_flight: list[Plan] = []
        self.next_step = 0
        self.newest_result = -1
        self.sampled: dict[TokenRef, int] = {}
        # What a rank knows: each slot's blocks and inputs, and what each place of a block was
        # computed from, which is everything before it.
        self.blocks_of: dict[int, list[int]] = {}
        self.inputs_of: dict[int, list[int | TokenRef]] = {}
        self.places: dict[tuple[int, int], list[int | TokenRef]] = {}

    @rule(
        shared=st.integers(0, 20),
        own=st.integers(0, 10),
        outputs=st.integers(1, 15),
        ignore=st.booleans(),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
    )
    def add(self, shared: int, own: int, outputs: int, ignore: bool, priority: int) -> None:
        number = len(self.sequences)
        prompt = list(range(2, 2 + shared)) + [50 + number] * max(own, not shared)
        one = sequence(number, prompt, outputs, priority, ignore_eos=ignore)
        self.sequences.append(one)
        self.scheduler.add(one)

    @rule()
    def plan(self) -> None:
        plan = self.scheduler.plan()
        if plan is None:
            return
        assert (plan.epoch, plan.step) == (self.scheduler.epoch, self.next_step)
        assert plan.step - self.newest_result <= self.window
        self.next_step += 1
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
            tokens = admission.prompt + admission.outputs
            assert admission.computed < len(tokens)
            assert admission.computed % BLOCK_SIZE == 0
            self.blocks_of[admission.slot] = []
            self.inputs_of[admission.slot] = list(tokens[: admission.computed])
        for appended in plan.appended:
            self.append(appended.slot, appended.blocks)
        for row in plan.rows:
            inputs = self.inputs_of[row.slot]
            for token in row.inputs:
                if isinstance(token, TokenRef):
                    assert self.newest_result < token.step < plan.step
                    assert row.start is None
                else:
                    assert row.start is not None
                inputs.append(token)
                position = len(inputs) - 1
                block = self.blocks_of[row.slot][position // BLOCK_SIZE]
                owners = [slot for slot, blocks in self.blocks_of.items() if block in blocks]
                assert owners == [row.slot], "a shared block was written"
                self.places[block, position % BLOCK_SIZE] = list(inputs)
            if row.start is not None:
                assert row.start == len(inputs) - len(row.inputs)
        self.in_flight.append(plan)
        for slot in plan.released:
            del self.blocks_of[slot], self.inputs_of[slot]

    def append(self, slot: int, blocks: list[int]) -> None:
        """Blocks that are new to a slot are nobody's, or hold just what it would compute."""
        held = {b for owned in self.blocks_of.values() for b in owned}
        for block in blocks:
            first = len(self.blocks_of[slot]) * BLOCK_SIZE
            inputs = self.inputs_of[slot]
            if first < len(inputs):
                for offset in range(BLOCK_SIZE):
                    computed = [self.resolve(t) for t in self.places[block, offset]]
                    assert computed == inputs[: first + offset + 1], "a hit on other tokens"
            else:
                assert block not in held, "block given out while taken"
            self.blocks_of[slot].append(block)

    def resolve(self, token: int | TokenRef) -> int:
        return self.sampled[token] if isinstance(token, TokenRef) else token

    @precondition(lambda self: self.in_flight)
    @rule(token=st.sampled_from([EOS, 5, 6]))
    def result(self, token: int) -> None:
        plan = self.in_flight.pop(0)
        self.newest_result = plan.step
        for number, row in enumerate(plan.rows):
            if row.yields & Yield.TOKEN:
                self.sampled[TokenRef(plan.step, number)] = token
        for accepted in self.scheduler.take_result(result_of(plan, token)):
            assert len(accepted.sequence.outputs) <= accepted.sequence.request.max_outputs

    @rule(microbatches=st.integers(1, 5), ahead=st.integers(1, 3))
    def change_microbatches(self, microbatches: int, ahead: int) -> None:
        before = [s for s in self.sequences if group_of(s) is not None]
        self.window = microbatches + ahead
        self.scheduler.set_microbatches(microbatches, self.window)
        assert self.scheduler.num_microbatches == microbatches
        assert [s for s in self.sequences if group_of(s) is not None] == before
        assert self.scheduler.decode_work.tokens == len(before)
        assert all(group_of(s) in range(microbatches) for s in before)

    @rule()
    def lose_everything_in_flight(self) -> None:
        """The next epoch's ranks know nothing."""
        outputs = [list(s.outputs) for s in self.sequences]
        self.scheduler.new_epoch(self.scheduler.epoch + 1)
        assert [s.outputs for s in self.sequences] == outputs
        self.forget()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.finish(data.draw(st.sampled_from(self.sequences)), "abort")

    @invariant()
    def finished_sequences_ended_for_a_reason(self) -> None:
        for s in self.sequences:
            if s.finish_reason == "stop":
                assert s.outputs[-1] == EOS
                assert not s.request.params.ignore_eos
            if s.finish_reason == "length":
                assert len(s.outputs) == s.request.max_outputs

    @invariant()
    def counts_are_those_of_the_sequences(self) -> None:
        holding = [s.run for s in self.sequences if s.run is not None]
        assert self.scheduler.slots_used == len(holding)
        assert self.scheduler.blocks_used == len({b for run in holding for b in run.blocks})
        unfinished = sum(not s.finished for s in self.sequences)
        assert self.scheduler.num_running + self.scheduler.num_waiting == unfinished

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
TestLoad.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_a_lone_sequence_is_planned_ahead_by_references() -> None:
    engine = scheduler()
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
    engine = scheduler(window=8)
    for number in range(4):
        engine.add(sequence(number, prompt=1, outputs=15, ignore_eos=True))
    sizes = [len(plan.rows) for _ in range(8) if (plan := engine.plan())]
    assert sizes[0] == 4, "all prompts fit one step"
    assert set(sizes[1:]) == {2}


def test_groups_that_endings_left_uneven_are_evened_out() -> None:
    engine = scheduler(window=8)
    everyone = [sequence(n, prompt=1, outputs=15, ignore_eos=True) for n in range(4)]
    for one in everyone:
        engine.add(one)
    first = engine.plan()
    assert first is not None
    engine.take_result(result_of(first))
    together = [one for one in everyone if group_of(one) == 0]
    for one in everyone:
        if one not in together:
            engine.finish(one, "abort")
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
        engine.take_result(Result(0, 0, [[1], [2]], []))
    engine = scheduler()
    engine.add(sequence(0, prompt=2, outputs=10))
    engine.plan()
    with pytest.raises(PipelineError, match="tokens"):
        engine.take_result(Result(0, 0, [[]], []))


@pytest.mark.parametrize(
    ("prompt", "outputs", "reason"),
    [(0, 1, "empty"), (MAX_LEN, 1, "--max-model-len"), (MAX_LEN + 5, 1, "--max-model-len")],
)
def test_a_request_that_could_never_run_is_refused(prompt: int, outputs: int, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        scheduler().add(sequence(0, prompt, outputs))


def test_a_request_larger_than_the_whole_cache_is_refused() -> None:
    engine = scheduler(num_blocks=5)
    with pytest.raises(UsageError, match="kv-cache-memory"):
        engine.add(sequence(0, prompt=10, outputs=20))


def run(engine: Scheduler, plans: int) -> list[Plan]:
    """So many plans, each with its result at once."""
    made = []
    for _ in range(plans):
        plan = engine.plan()
        if plan is None:
            break
        made.append(plan)
        engine.take_result(result_of(plan))
    return made


def test_a_prefix_is_found_by_whoever_begins_with_the_same_tokens() -> None:
    engine = scheduler()
    tokens = list(range(2, 15))
    first, same, longer, other = (
        sequence(0, tokens, 2),
        sequence(1, tokens, 2),
        sequence(2, [*tokens[:8], 50, 51, 52, 53, 54], 2),
        sequence(3, [50, *tokens[1:]], 2),
    )
    engine.add(first)
    run(engine, 5)
    for one in (same, longer, other):
        engine.add(one)
    run(engine, 9)
    cached = [s.cached_tokens for s in (first, same, longer, other)]
    # Three full blocks of the thirteen tokens; two are common with the longer one.
    assert cached == [0, 12, 8, 0]
    assert (engine.counters.prefix_cache_queries, engine.counters.prefix_cache_hits) == (4 * 13, 20)


def test_a_prefix_that_this_very_step_computes_is_waited_for() -> None:
    engine = scheduler(max_num_batched_tokens=40)
    tokens = list(range(2, 15))
    both = [sequence(n, tokens, 2) for n in range(2)]
    for one in both:
        engine.add(one)
    first, second = engine.plan(), engine.plan()
    assert first is not None
    assert second is not None
    assert [len(row.inputs) for row in first.rows] == [13]
    # The first one's token is on its way: the other's one new token fills the step.
    assert [len(row.inputs) for row in second.rows] == [1]
    assert second.admitted[0].computed == 12
    assert both[1].cached_tokens == 12


def test_without_prefix_caching_nothing_is_found() -> None:
    engine = scheduler(prefix_caching=False)
    for number in range(2):
        engine.add(sequence(number, list(range(2, 15)), 2))
        run(engine, 5)
    assert all(admission.computed == 0 for plan in run(engine, 5) for admission in plan.admitted)
    assert engine.counters.prefix_cache_queries == 0


def test_who_must_see_all_logits_does_not_ask_the_prefix_cache() -> None:
    engine = scheduler()
    engine.add(sequence(0, list(range(2, 15)), 2, prompt_logprobs=1))
    run(engine, 1)
    assert engine.counters.prefix_cache_queries == 0


def test_the_newest_is_preempted_and_comes_back_with_its_tokens() -> None:
    engine = scheduler(num_blocks=8, num_microbatches=1)
    old, new = (sequence(n, 8, 16, ignore_eos=True) for n in range(2))
    engine.add(old)
    run(engine, 2)
    engine.add(new)
    while not engine.counters.preemptions:
        run(engine, 1)
    assert old.run is not None
    assert new.run is None
    before = list(new.outputs)
    assert before
    admitted = [a for plan in run(engine, 60) for a in plan.admitted]
    assert [(a.prompt, a.outputs[: len(before)]) for a in admitted] == [
        (new.request.prompt, before)
    ]
    assert [s.finish_reason for s in (old, new)] == ["length", "length"]
    assert (len(old.outputs), len(new.outputs)) == (16, 16)


def test_a_preempted_sequence_is_admitted_only_when_nothing_of_it_is_in_flight() -> None:
    engine = scheduler(num_blocks=6, num_microbatches=1, window=6)
    old, new = (sequence(n, 4, 16, ignore_eos=True) for n in range(2))
    engine.add(old)
    engine.add(new)
    in_flight: list[Plan] = []
    for _ in range(200):
        while (plan := engine.plan()) is not None:
            if plan.admitted and engine.counters.preemptions:
                assert new.in_flight == 1, "the row that has just been planned"
            in_flight.append(plan)
        if not in_flight:
            break
        engine.take_result(result_of(in_flight.pop(0)))
    assert engine.counters.preemptions
    assert engine.idle


def test_priorities_come_before_the_order_of_arrival() -> None:
    engine = scheduler(max_num_seqs=1)
    order = [sequence(n, 3, 1, priority=p) for n, p in enumerate([1, 0, 1, -1])]
    for one in order:
        engine.add(one)
    admitted = [a.prompt[0] - 100 for plan in run(engine, 20) for a in plan.admitted]
    assert admitted == [3, 1, 0, 2]


@pytest.mark.parametrize(("groups", "stages"), [(3, 1), (1, 2), (1, 3), (2, 3)])
def test_while_there_is_prefill_a_lone_row_leaves_steps_to_the_chunks(
    groups: int, stages: int
) -> None:
    """A row whose token is not back would hold up the chunks in its step, and stages with it."""
    engine = scheduler(
        num_microbatches=groups, num_stages=stages, window=6, max_num_batched_tokens=5
    )
    engine.add(sequence(0, 2, 15, ignore_eos=True))
    engine.add(sequence(1, 30, 2))
    plans = [plan for _ in range(6) if (plan := engine.plan())]
    assert len(plans) == 6
    for plan in plans:
        for row in plan.rows:
            for token in row.inputs:
                assert isinstance(token, int) or plan.step - token.step >= max(groups, stages)
        assert sum(len(row.inputs) for row in plan.rows) == 5, "chunks fill every step"


def test_behind_long_steps_nothing_is_planned_that_need_not_be() -> None:
    """Whoever comes next waits for all that is planned."""
    for seconds, planned in ((0.01, 4), (0.1, 3)):
        engine = scheduler(num_stages=2, window=4)
        engine.cost = StepCost(fixed=seconds, per_token=0.0, per_position=0.0, per_sampled=0.0)
        engine.add(sequence(0, 36, 2))
        assert len([plan for _ in range(4) if (plan := engine.plan())]) == planned


def test_prompt_logprobs_that_came_before_a_preemption_are_not_given_twice() -> None:
    engine = scheduler(num_blocks=10, num_microbatches=1, max_num_batched_tokens=2, max_num_seqs=2)
    old = sequence(0, 4, 30, ignore_eos=True)
    new = sequence(1, 28, 3, ignore_eos=True, prompt_logprobs=0)
    engine.add(old)
    run(engine, 3)
    engine.add(new)
    came: list[TokenLogprobs] = []
    had_before = None
    while not engine.idle:
        plan = engine.plan()
        assert plan is not None
        if engine.counters.preemptions and had_before is None:
            had_before = len(came)
        reports = []
        for number, row in enumerate(plan.rows):
            if row.yields & Yield.PROMPT_LOGPROBS:
                assert row.start is not None
                following = range(row.start + 1, min(row.start + len(row.inputs) + 1, 28))
                entries = [TokenLogprobs([place], [0.0], 1) for place in following]
                reports.append(RowLogprobs(number, None, entries))
        tokens = result_of(plan).tokens
        for accepted in engine.take_result(Result(0, plan.step, tokens, reports)):
            came += accepted.prompt_logprobs or []
    assert had_before is not None
    assert 0 < had_before < 27, "it was preempted in the middle of its prompt"
    assert [entry.ids[0] for entry in came] == list(range(1, 28))


def test_of_two_the_one_of_the_larger_priority_is_preempted_although_it_is_older() -> None:
    engine = scheduler(num_blocks=8, num_microbatches=1)
    old = sequence(0, 8, 16, priority=1, ignore_eos=True)
    new = sequence(1, 8, 16, ignore_eos=True)
    engine.add(old)
    engine.add(new)
    while not engine.counters.preemptions:
        run(engine, 1)
    assert old.run is None
    assert new.run is not None


def test_a_preempted_sequence_keeps_its_place_in_line_and_its_first_times() -> None:
    engine = scheduler(num_blocks=8, num_microbatches=1, max_num_seqs=2)
    everyone = [sequence(n, 8, 16, ignore_eos=True) for n in range(3)]
    for one in everyone:
        engine.add(one)
    while not engine.counters.preemptions:
        run(engine, 1)
    second = everyone[1]
    assert second.run is None
    before = (second.admitted_at, second.cached_tokens)
    admitted = [a.prompt[0] - 100 for plan in run(engine, 100) for a in plan.admitted]
    assert admitted[0] == 1
    assert (second.admitted_at, second.cached_tokens) == before
    # Coming back is no new question to the prefix cache.
    assert engine.counters.prefix_cache_queries == sum(len(one.request.prompt) for one in everyone)


def test_one_sequence_at_a_time_makes_room_however_many_rows_need_it() -> None:
    # Three rows need a block in the same step when none is left; the fourth's would do for all.
    engine = scheduler(num_blocks=15, num_microbatches=1, max_num_batched_tokens=40)
    everyone = [sequence(n, 9, 15, ignore_eos=True) for n in range(4)]
    for one in everyone:
        engine.add(one)
    while not engine.counters.preemptions:
        assert run(engine, 1)
    assert engine.counters.preemptions == 1
    assert [one.run is None for one in everyone] == [False, False, False, True]


def test_nobody_is_admitted_whom_the_next_rows_would_preempt() -> None:
    engine = scheduler(num_blocks=8, num_microbatches=1)
    old, new = (sequence(n, 15, 8, ignore_eos=True) for n in range(2))
    engine.add(old)
    run(engine, 4)
    # Five blocks of eight are taken; three would hold the other's twelve tokens, but old's next
    # block is one of them.
    new.request.prompt[:] = new.request.prompt[:12]
    engine.add(new)
    run(engine, 1)
    assert new.run is None
    run(engine, 100)
    assert engine.counters.preemptions == 0
    assert new.finished


def test_an_unrelated_sequence_goes_ahead_of_one_that_waits_for_its_beginning() -> None:
    engine = scheduler(max_num_batched_tokens=20)
    tokens = list(range(2, 15))
    leader, follower = (sequence(n, tokens, 2) for n in range(2))
    other = sequence(2, [50, 51], 2)
    for one in (leader, follower, other):
        engine.add(one)
    first = engine.plan()
    assert first is not None
    assert sorted(len(row.inputs) for row in first.rows) == [2, 13]
    assert follower.run is None


def prefilled(plan: Plan | None) -> dict[int, int]:
    """Tokens of each sequence's prompt in a step, by its number; all have prompts of one token."""
    assert plan is not None
    firsts = [(row.inputs[0], len(row.inputs)) for row in plan.rows]
    return {first - 100: count for first, count in firsts if isinstance(first, int)}


def test_a_short_prompt_goes_before_a_long_one_that_has_begun() -> None:
    engine = scheduler()
    engine.add(sequence(0, 30, 2))
    assert prefilled(engine.plan()) == {0: 7}
    engine.add(sequence(1, 3, 2))
    assert prefilled(engine.plan()) == {1: 3, 0: 4}


def test_a_better_priority_goes_before_one_that_has_begun() -> None:
    engine = scheduler()
    engine.add(sequence(0, 10, 2))
    assert prefilled(engine.plan()) == {0: 7}
    engine.add(sequence(1, 20, 2, priority=-1))
    plans = [prefilled(engine.plan()) for _ in range(3)]
    assert plans == [{1: 7}, {1: 7}, {1: 6, 0: 1}]


def test_a_long_prompt_ends_however_many_short_ones_keep_coming() -> None:
    """Two short prompts a step would fill every step; the long one has half of them all the same,
    and then all, until it ends."""
    engine = scheduler(num_blocks=400, window=1)
    long = sequence(0, 30, 2, ignore_eos=True)
    engine.add(long)
    steps = 0
    while not long.outputs:
        for _ in range(2):
            engine.add(sequence(steps + 1, 6, 1))
        (plan,) = run(engine, 1)
        steps += 1
        assert sum(len(row.inputs) for row in plan.rows) == BUDGET
        assert steps <= 2 * 30 / BUDGET + 2


def test_who_has_no_room_is_passed_by_nobody() -> None:
    engine = scheduler(num_blocks=10, max_num_batched_tokens=40)
    first, large, small = sequence(0, 20, 4), sequence(1, 30, 4), sequence(2, 2, 1)
    engine.add(first)
    run(engine, 1)
    engine.add(large)
    engine.add(small)
    run(engine, 1)
    assert (large.run, small.run) == (None, None)
    run(engine, 20)
    assert all(one.finished for one in (first, large, small))


def test_what_the_prefix_cache_has_makes_a_prompt_short() -> None:
    engine = scheduler()
    engine.add(sequence(0, [7] * 21, 1))
    run(engine, 6)
    engine.add(sequence(1, 12, 1))
    engine.add(sequence(2, [7] * 21, 1))
    plan = engine.plan()
    assert plan is not None
    assert [(row.inputs[0], len(row.inputs)) for row in plan.rows] == [(7, 1), (101, 6)]


@pytest.mark.parametrize(("microbatches", "stages", "steps"), [(1, 1, 1), (2, 4, 4), (6, 2, 6)])
def test_a_limit_on_the_gap_is_one_on_each_of_the_steps_in_it(
    microbatches: int, stages: int, steps: int
) -> None:
    """A token passes through all stages, and comes back to a group that waits for its turn."""
    engine = scheduler(
        num_microbatches=microbatches,
        num_stages=stages,
        max_num_batched_tokens=1000,
        max_model_len=1000,
        num_blocks=400,
        max_itl_s=0.1205 * steps,
    )
    engine.cost = StepCost(fixed=0.020, per_token=1e-3, per_position=0.0, per_sampled=0.0)
    engine.add(sequence(0, 900, 2))
    assert prefilled(engine.plan()) == {0: 100}


def test_what_a_step_reports_of_prompts_is_part_of_its_work_and_of_its_limit() -> None:
    """Each such token passes the output projection, as one that is sampled does."""
    engine = scheduler(
        num_microbatches=1,
        num_stages=2,
        max_num_batched_tokens=1000,
        max_model_len=1000,
        num_blocks=400,
        max_itl_s=0.241,
    )
    engine.cost = StepCost(fixed=0.020, per_token=1e-3, per_position=0.0, per_sampled=1e-3)
    engine.add(sequence(0, 120, 2, prompt_logprobs=1))
    assert prefilled(engine.plan()) == {0: 50}
    assert engine.newest_work.sampled == 50
    assert prefilled(engine.plan()) == {0: 50}
    # The last token has no report, but one is sampled after it.
    assert prefilled(engine.plan()) == {0: 20}
    assert engine.newest_work.sampled == 20


def test_a_report_beyond_a_steps_share_holds_up_nobody_who_reports_nothing() -> None:
    engine = scheduler(num_microbatches=1, window=1, max_num_batched_tokens=1000)
    size = MOST_REPORTED + 1
    engine.add(sequence(0, 2, 12, own_report_size=size, ignore_eos=True, logprobs=1))
    engine.add(sequence(1, 2, 12, ignore_eos=True))
    assert [len(plan.rows) for plan in run(engine, 4)] == [2] * 4


def test_a_step_reports_no_more_than_its_share_and_those_that_wait_have_their_turn() -> None:
    """Of many requests, as of one; others have their token in every step."""
    engine = scheduler(num_microbatches=1, window=1, max_num_batched_tokens=1000)
    size = MOST_REPORTED // 2 + 1
    large = [
        sequence(number, 2, 12, own_report_size=size, ignore_eos=True, logprobs=1)
        for number in range(3)
    ]
    other = sequence(3, 2, 12, ignore_eos=True)
    for one in (*large, other):
        engine.add(one)
    # The first token of one is a report as well.
    first = run(engine, 1)[0]
    assert sum(row.yields & Yield.TOKEN > 0 for row in first.rows) == 2
    run(engine, 2)
    assert all(one.outputs for one in large)
    before = [len(one.outputs) for one in large]
    plans = run(engine, 6)
    assert [len(plan.rows) for plan in plans] == [2] * 6
    assert [len(one.outputs) - count for one, count in zip(large, before, strict=True)] == [2] * 3
    assert len(other.outputs) == 9


def test_an_end_before_min_tokens_is_none() -> None:
    engine = scheduler()
    one = sequence(0, 3, 6, min_tokens=3, stop_token_ids=[5])
    engine.add(one)
    run(engine, 20)
    assert (one.outputs, one.finish_reason) == ([5, 5, 5], "stop")


def test_when_everything_in_flight_is_lost_sequences_go_on_from_their_accepted_tokens() -> None:
    engine = scheduler(FirstCome())
    tokens = list(range(2, 14))
    old, new = (sequence(n, tokens, 6, ignore_eos=True) for n in range(2))
    engine.add(old)
    run(engine, 4)
    engine.add(new)
    while engine.plan():
        pass
    had = list(old.outputs)
    assert had
    before = engine.counters.steps
    engine.new_epoch(1)
    assert (engine.steps_in_flight, engine.num_running, engine.num_waiting) == (0, 0, 2)
    assert (engine.free_blocks, engine.slots_used) == (40, 0)
    plan = engine.plan()
    assert plan is not None
    assert (plan.epoch, plan.step, engine.counters.steps) == (1, 0, before + 1)
    # Nothing is cached on the new stages, and the older one comes first.
    assert [(a.prompt, a.outputs, a.computed) for a in plan.admitted] == [(tokens, had, 0)]
    engine.take_result(result_of(plan))
    run(engine, 50)
    assert [len(one.outputs) for one in (old, new)] == [6, 6]
    assert engine.idle


def test_who_ended_before_everything_was_lost_stays_ended_and_has_nothing_to_release() -> None:
    engine = scheduler()
    one = sequence(0, 4, 6)
    engine.add(one)
    engine.plan()
    engine.finish(one, "abort")
    engine.new_epoch(1)
    assert engine.idle
    assert engine.plan() is None


def test_who_was_preempted_with_rows_in_flight_does_not_wait_for_them_in_the_next_epoch() -> None:
    engine = scheduler(num_blocks=8, num_microbatches=1, max_num_seqs=2)
    for number in range(2):
        engine.add(sequence(number, 8, 16, ignore_eos=True))
    in_flight = []
    while not engine.counters.preemptions:
        while plan := engine.plan():
            in_flight.append(plan)
        if not engine.counters.preemptions:
            engine.take_result(result_of(in_flight.pop(0)))
    assert engine.steps_in_flight
    engine.new_epoch(1)
    plan = engine.plan()
    assert plan is not None
    assert [row.slot for row in plan.rows] == [a.slot for a in plan.admitted]
    engine.take_result(result_of(plan))
    run(engine, 100)
    assert engine.idle
