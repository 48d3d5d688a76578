from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.limits import SchedulerConfig
from headrace.engine.prefill_order import FirstCome, PrefillOrder, ShortestFirst
from headrace.engine.request import Request, Run, Sequence
from headrace.engine.scheduler import Scheduler
from headrace.engine.waiting import WaitingQueue
from headrace.protocol.messages import Result
from headrace.protocol.plan import Sampling, row_samples
from headrace.sampling_params import SamplingParams

STEP = 10


def sequence(arrival: int, prompt: int, priority: int = 0) -> Sequence:
    params = SamplingParams(max_tokens=1)
    request = Request(arrival, [1] * prompt, params, 1, priority)
    return Sequence(request, 0, Sampling(seed=0), arrival)


def begun(arrival: int, prompt: int, planned: int = 0) -> Sequence:
    """One that has a slot, and so many positions planned."""
    one = sequence(arrival, prompt)
    one.run = Run(0, one.request.prompt, [], 0, planned)
    return one


def waiting(*sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue()
    for one in sequences:
        queue.push(one, len(one.request.prompt))
    return queue


def test_the_least_left_goes_first_whether_it_has_begun_or_not() -> None:
    long, middle = begun(0, 90), begun(1, 60, planned=40)
    short, shortest = sequence(2, 30), sequence(3, 10)
    queue = waiting(short, shortest)
    turns = list(ShortestFirst().turns([long, middle], queue, 9))
    assert turns == [shortest, middle, short, long]
    assert list(ShortestFirst().turns([long, middle], queue, 1)) == [shortest, middle, long]
    assert list(ShortestFirst().turns([long, middle], queue, 0)) == [middle, long]
    assert list(FirstCome().turns([long, middle], queue, 9)) == [long, middle, short, shortest]


def test_of_two_alike_the_one_that_came_first_goes_first() -> None:
    first, second = sequence(0, 30), begun(1, 30)
    assert list(ShortestFirst().turns([second], waiting(first), 9)) == [first, second]


def test_a_better_priority_goes_before_anything_shorter() -> None:
    short, urgent = begun(0, 5), sequence(1, 90, priority=-1)
    assert list(ShortestFirst().turns([short], waiting(urgent), 9)) == [urgent, short]


def test_what_others_had_is_owed_to_the_oldest() -> None:
    order = ShortestFirst()
    long, short, other = begun(0, 90), begun(1, 8), begun(2, 9)
    assert list(order.turns([long, short, other], WaitingQueue(), 0)) == [short, other, long]
    order.planned({short: 6, long: 4}, [])
    assert next(iter(order.turns([long, short, other], WaitingQueue(), 0))) is long
    order.planned({long: 1, short: 1}, [])
    assert next(iter(order.turns([long, short, other], WaitingQueue(), 0))) is long
    order.planned({long: 2}, [])
    assert next(iter(order.turns([long, short, other], WaitingQueue(), 0))) is short


def test_nothing_is_owed_to_who_waits_for_a_beginning_that_is_computed_for_another() -> None:
    order = ShortestFirst()
    oldest, leader = sequence(0, 90), begun(1, 80)
    list(order.turns([leader], waiting(oldest), 9))
    order.planned({leader: 10}, [oldest])
    assert oldest.owed_prefill == 0
    order.planned({leader: 10}, [])
    assert oldest.owed_prefill == 10


@dataclass
class Line:
    """Prompts that are prefilled alone: each is done with its only token. ended: prefilled tokens,
    of all, by when each had it."""

    order: PrefillOrder
    sequences: list[Sequence] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)
    total: int = 0

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            max_model_len=1000,
            max_num_seqs=100,
            max_num_batched_tokens=STEP,
            block_size=1,
            num_blocks=100_000,
            num_microbatches=1,
            window=1,
            eos_token_ids=frozenset(),
            prefix_caching=False,
            prefill_policy="budget",
        )
        self.scheduler = Scheduler(config, order=self.order)

    def add(self, prompt: int) -> None:
        self.sequences.append(sequence(len(self.sequences), prompt))
        self.scheduler.add(self.sequences[-1])

    def step(self) -> None:
        plan = self.scheduler.plan()
        if plan is None:
            return
        self.total += sum(len(row.inputs) for row in plan.rows)
        tokens = [[1] if row_samples(row) else [] for row in plan.rows]
        for accepted in self.scheduler.take_result(Result(0, plan.step, tokens, [])):
            self.ended[accepted.sequence.request.id] = self.total


@given(
    arrivals=st.lists(st.lists(st.integers(1, 60), max_size=6), min_size=1, max_size=30),
    least=st.integers(1, 60),
)
def test_nobody_waits_more_than_twice_as_long_as_first_come_first_served(
    arrivals: list[list[int]], least: int
) -> None:
    """In tokens prefilled: twice its own and of those before it, and a step's for each of them."""
    line = Line(ShortestFirst())
    line.add(least)
    came = {0: 0}
    for prompts in arrivals:
        for prompt in prompts:
            came[len(line.sequences)] = line.total
            line.add(prompt)
        line.step()
    while not line.scheduler.idle:
        line.step()
    for n, one in enumerate(line.sequences):
        before = [s for s in line.sequences[:n] if line.ended[s.request.id] > came[n]]
        work = len(one.request.prompt) + sum(len(s.request.prompt) for s in before)
        assert line.ended[n] - came[n] <= 2 * work + STEP * (len(before) + 2)


class NothingOwed(ShortestFirst):
    """Without ageing."""

    def planned(self, chunks: Mapping[Sequence, int], postponed: Collection[Sequence]) -> None:
        pass


def starved(order: PrefillOrder, size: int) -> bool:
    """Whether a prompt of 200 tokens waits for more than twice as many, when enough of `size`
    tokens come in every step to fill it."""
    line = Line(order)
    line.add(200)
    while 0 not in line.ended and line.total <= 2 * 200 + 2 * STEP:
        for _ in range(STEP // size + 1):
            line.add(size)
        line.step()
    return 0 not in line.ended


@pytest.mark.parametrize("size", [1, STEP // 2, STEP])
def test_no_load_of_short_prompts_starves_a_long_one(size: int) -> None:
    assert not starved(ShortestFirst(), size)
    assert starved(NothingOwed(), size), "the load is too light to tell"


def test_alone_or_among_equals_the_order_is_that_of_arrival() -> None:
    ends = []
    for order in (ShortestFirst(), FirstCome()):
        line = Line(order)
        for _ in range(12):
            line.add(25)
        while not line.scheduler.idle:
            line.step()
        ends.append(line.ended)
    assert ends[0] == ends[1]
