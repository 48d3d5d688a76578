"""Turns running sequences into plans, up to `window` steps ahead of the newest result."""

import time
from bisect import insort
from collections import deque
from collections.abc import Callable

import msgspec

from headrace.engine.block_pool import BlockPool
from headrace.engine.counters import Counters
from headrace.engine.limits import SchedulerConfig
from headrace.engine.microbatch_count import steps_in_a_round
from headrace.engine.microbatches import Microbatches
from headrace.engine.plan_draft import PlanDraft, StepInFlight
from headrace.engine.prefill_order import PrefillOrder, ShortestFirst
from headrace.engine.prefill_policy import Situation, StepAllowance, prefill_policy
from headrace.engine.prefix_cache import PrefixCache
from headrace.engine.request import FinishReason, Sequence
from headrace.engine.shared_rules import RulesOnStage
from headrace.engine.step_cost import (
    NO_WORK,
    PRIOR,
    StepCost,
    StepWork,
    chunk_attended,
    total_work,
)
from headrace.engine.waiting import WaitingQueue, by_rank
from headrace.errors import PipelineError
from headrace.protocol.messages import Result, TokenLogprobs
from headrace.protocol.plan import Admission, BlocksAppended, Plan, TokenRef

# A step that takes so long hides the way of the next one's plan, some milliseconds on a network.
_LONG_STEP_S = 0.05
# Waiting sequences that a plan passes over because their beginning is being computed: looking at
# each costs some microseconds.
_MOST_POSTPONED = 16


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """What a row's result brought for a sequence that was still running.

    token is None for a row of prompt tokens alone. prompt_logprobs: of the next prompt tokens.
    """

    sequence: Sequence
    token: int | None
    logprobs: TokenLogprobs | None
    prompt_logprobs: list[TokenLogprobs] | None


class Scheduler:
    """Decode rows before prefill chunks; better priorities first; in each, see PrefillOrder.

    Sequences that decode belong to one of `num_microbatches` groups, which take turns, so that a
    row's token is back when its group's turn comes. Prefill chunks go into any step. When blocks
    run out, the newest sequence is preempted: it loses slot and blocks, to be computed again.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        order: PrefillOrder | None = None,
    ) -> None:
        self.config = config
        # What steps cost the slowest stage: the engine keeps it up to date from reports.
        self.cost: StepCost = PRIOR
        self.newest_work = NO_WORK
        self.counters = Counters()
        self._clock = clock
        self._policy = prefill_policy(config.prefill_policy)
        self._order = ShortestFirst() if order is None else order
        self._window = config.window
        self._arrivals = 0
        self._begin(config.epoch, config.num_microbatches)

    def _begin(self, epoch: int, num_microbatches: int) -> None:
        """Everything that is void when an epoch is over, made anew."""
        config = self.config
        self.epoch = epoch
        self._pool = BlockPool(config.num_blocks)
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._cache = PrefixCache(
            self._pool, config.block_size, config.prefix_caching, self.counters
        )
        self._rules = RulesOnStage()
        self._waiting = WaitingQueue()
        # Ordered by rank.
        self._prefilling: list[Sequence] = []
        self._groups = Microbatches(num_microbatches)
        # Those whose slot and blocks the next plan gives back.
        self._releasing: list[Sequence] = []
        self._in_flight: deque[StepInFlight] = deque()
        self._next_step = 0

    @property
    def steps_in_flight(self) -> int:
        """Plans whose result has not arrived."""
        return len(self._in_flight)

    @property
    def oldest_step_in_flight(self) -> int | None:
        """The step whose result is due next, if any."""
        return self._in_flight[0].step if self._in_flight else None

    @property
    def newest_step(self) -> int:
        """The newest step planned in this epoch; -1 before the first."""
        return self._next_step - 1

    @property
    def free_blocks(self) -> int:
        """Blocks owned by no sequence."""
        return self._pool.free

    @property
    def blocks_used(self) -> int:
        """Blocks that sequences own; shared ones count once."""
        return self._pool.num_blocks - self._pool.free

    @property
    def slots_used(self) -> int:
        """Slots of running sequences, and of those whose release no plan has carried yet."""
        return self.config.max_num_seqs - len(self._free_slots)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that have a slot and go on."""
        return len(self._prefilling) + self._groups.decoding

    @property
    def num_microbatches(self) -> int:
        """Groups of decoding sequences that take turns."""
        return self._groups.count

    @property
    def decode_work(self) -> StepWork:
        """What a step with a row of every decoding sequence would carry."""
        return total_work(self._groups.work(n) for n in range(self._groups.count))

    def set_microbatches(self, count: int, window: int) -> None:
        """Have so many groups, and so many steps in flight at most, from the next plan on."""
        self._groups.resize(count)
        self._window = window

    @property
    def idle(self) -> bool:
        """Whether nothing waits, runs, is to be released or is on its way."""
        pending = self._releasing or self._rules.unused
        return not (self._waiting or self.num_running or pending or self._in_flight)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; raises UsageError if it could never run."""
        self.config.check(len(sequence.prompt), sequence.max_outputs)
        sequence.max_outputs = min(
            sequence.max_outputs, self.config.max_model_len - len(sequence.prompt)
        )
        self._rules.join(sequence.rules)
        sequence.arrival = self._arrivals
        sequence.queued_at = self._clock()
        self._arrivals += 1
        self._wait(sequence)

    def new_epoch(self, epoch: int) -> None:
        """Everything in flight, and all that stages held, is lost: begin anew, at step 0.

        Accepted tokens are all that is left. Whoever had not ended waits, in its old place in line,
        to be computed again from them.
        """
        waiting = self._waiting.first_by_rank(len(self._waiting))
        unfinished = [*self._prefilling, *self._groups.all(), *waiting]
        for sequence in [*unfinished, *self._releasing]:
            sequence.slot, sequence.blocks, sequence.microbatch = None, [], None
            sequence.in_flight = 0
        self._begin(epoch, self._groups.count)
        for sequence in unfinished:
            self._wait(sequence)

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a sequence now, for whatever reason; slot and blocks come back with the next plan."""
        if sequence.finished:
            return
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self._rules.leave(sequence.rules)
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._stop_running(sequence)

    def plan(self) -> Plan | None:
        """The next plan, or None if the window is full or there is nothing to do."""
        if len(self._in_flight) >= self._window or self._enough_planned:
            return None
        draft = PlanDraft(self._next_step)
        self._groups.even_out(self.cost)
        self._plan_rows(draft)
        if not (draft.rows or self._releasing or self._rules.unused):
            return None
        self._groups.planned(draft.group, draft.decode_rows)
        self._cache.step_planned()
        plan = draft.plan(self.epoch, self._release(), self._rules.drop_unused())
        self._in_flight.append(draft.in_flight())
        self._next_step += 1
        self.counters.steps += 1
        self.newest_work = draft.work
        return plan

    def take_result(self, result: Result) -> list[Accepted]:
        """Apply the result of the oldest step in flight.

        Tokens of sequences that ended meanwhile are dropped here: they reach nobody. Raises
        PipelineError if the result is not the one that is due.
        """
        due = self.oldest_step_in_flight
        if result.step != due:
            raise PipelineError(f"got the result of step {result.step}, due was step {due}")
        flight = self._in_flight.popleft()
        size = self.config.block_size
        accepted = []
        reports = flight.reports(result)
        for row, (sequence, tokens) in enumerate(zip(flight.rows, result.tokens, strict=True)):
            sequence.in_flight -= 1
            if sequence.finish_reason is not None:
                continue
            own, of_prompt = None, None
            if reports and row in reports:
                report, start = reports[row]
                own = report.sampled
                of_prompt = sequence.new_prompt_logprobs(start, report.prompt)
            if not tokens:
                if of_prompt:
                    accepted.append(Accepted(sequence, None, None, of_prompt))
                continue
            token = tokens[0]
            if sequence.slot is None:
                self._waiting.remove(sequence)
                sequence.outputs.append(token)
                self._wait(sequence)
            else:
                sequence.outputs.append(token)
                # Spares a call for nearly every token.
                if sequence.planned_positions // size > sequence.published:
                    self._cache.token_accepted(sequence)
            accepted.append(Accepted(sequence, token, own, of_prompt))
            end = sequence.end_at(token, self.config.eos_token_ids)
            if end is not None:
                self.finish(sequence, *end)
        return accepted

    # What a step carries

    @property
    def _enough_planned(self) -> bool:
        """Whether all stages have a step, and the newest is so long that the next can be planned
        later, when more is known of who waits."""
        ahead = len(self._in_flight) > self._round
        return ahead and self.cost.seconds(self.newest_work) > _LONG_STEP_S

    def _plan_rows(self, draft: PlanDraft) -> None:
        """Fill the draft with rows, if possible with none whose token comes late."""
        turns = self._groups.turns()
        if self._prefill_possible:
            # An empty group's turn is not passed over: a chunk fills it.
            draft.group = turns[0]
            # While a token passes through the other stages each can compute a step of chunks.
            self._plan_decode_rows(draft, draft.step - self._round)
            self._plan_chunks(draft)
        for newest in (draft.step - self._groups.count, draft.step):
            for group in turns:
                if draft.rows:
                    return
                draft.group = group
                self._plan_decode_rows(draft, newest)

    def _plan_decode_rows(self, draft: PlanDraft, newest: int) -> None:
        """A row for each member of the group that has room and whose token is no newer than that of
        step `newest`: a younger one would hold up the others."""
        size = self.config.block_size
        token: int | TokenRef
        start: int | None
        postponed = []
        for sequence in list(self._groups.members(draft.group)):
            position = sequence.planned_positions
            index = position - len(sequence.prompt)
            if index < len(sequence.outputs):
                token, start = sequence.outputs[index], position
            else:
                assert sequence.newest_sample is not None
                token, start = sequence.newest_sample, None
                if token.step > newest or index + 1 >= sequence.max_outputs:
                    continue
            if sequence.own_report_size and not draft.room_to_decode(sequence):
                postponed.append(sequence)
                continue
            if sequence.microbatch is None or (
                position == len(sequence.blocks) * size
                and not self._append_blocks(draft, sequence, 1)
            ):
                # Preempted by an older row of this very step, or to wait until there is room.
                continue
            draft.add_decode_row(sequence, token, start)
        if postponed:
            self._groups.put_first(draft.group, postponed)

    @property
    def _round(self) -> int:
        """Steps in which every group has a turn."""
        return steps_in_a_round(self._groups.count, self.config.num_stages)

    @property
    def _prefill_possible(self) -> bool:
        """Whether there is prefill that a step could take on."""
        return bool(self._prefilling) or bool(self._waiting and self._free_slots)

    def _plan_chunks(self, draft: PlanDraft) -> None:
        """Prefill chunks, as much as the policy allows, in the order that shares it out."""
        allowance = self._policy.allow(self._situation(draft))
        places = len(self._free_slots)
        admissible = places + _MOST_POSTPONED if places else 0
        postponed: set[Sequence] = set()
        closed: bool | None = None
        for sequence in self._order.turns(self._prefilling, self._waiting, admissible):
            # Making room for an older one may have preempted it.
            if sequence in self._prefilling:
                if not self._plan_chunk(draft, sequence, allowance):
                    break
                continue
            if closed is None:
                closed = self._oldest_waits_for_room()
            if closed or sequence.in_flight or sequence.slot is not None:
                continue
            cached = self._cache.find(sequence)
            if self._cache.begins_in_this_step(sequence, len(cached)):
                # In the next step more of its beginning is there for free.
                postponed.add(sequence)
                closed = len(postponed) == _MOST_POSTPONED
                continue
            if not self._free_slots or not self._has_room_for(sequence, cached):
                closed = True
                continue
            start = len(cached) * self.config.block_size
            to_report = draft.room_to_report(sequence)
            unsent = self._rules.unsent(sequence.rules)
            if not to_report or not draft.takes_rules(unsent):
                # The next step has room again; others need none.
                continue
            wanted = min(sequence.length - start, to_report)
            count = allowance.take(start, wanted, sequence.wants_prompt_logprobs)
            if count == 0:
                break
            self._admit(draft, sequence, cached)
            self._add_chunk(draft, sequence, count)
        self._order.planned(draft.chunks, postponed)

    def _oldest_waits_for_room(self) -> bool:
        """Whether the first in line, by rank, cannot be admitted: then nobody passes it, or there
        might never be room."""
        oldest = self._waiting.oldest
        if oldest is None:
            return False
        if oldest.in_flight or oldest.slot is not None:
            # Preempted a moment ago.
            return True
        cached = self._cache.find(oldest)
        begins = self._cache.begins_in_this_step(oldest, len(cached))
        return not begins and not self._has_room_for(oldest, cached)

    def _situation(self, draft: PlanDraft) -> Situation:
        groups = self.decode_work
        running = [
            StepWork(
                s.prefill_left,
                chunk_attended(s.planned_positions, s.prefill_left),
                s.prefill_left if s.wants_prompt_logprobs else 1,
            )
            for s in self._prefilling
        ]
        return Situation(
            decode=draft.work,
            mean_decode=StepWork(*(part // self._groups.count for part in groups)),
            pending=total_work([*running, self._admissible_work]),
            num_microbatches=self._groups.count,
            free_fraction=self._pool.free / self._pool.num_blocks,
            cost=self.cost,
            max_tokens=self.config.max_num_batched_tokens,
            max_step_s=self._max_step_s,
        )

    @property
    def _max_step_s(self) -> float | None:
        """What a step may take so that no sequence waits longer than allowed for its next token: a
        group's next step comes after one of each group, and a token passes through all stages."""
        limit = self.config.max_itl_s
        return None if limit is None else limit / self._round

    @property
    def _admissible_work(self) -> StepWork:
        """What waiting sequences would bring if as many were admitted as have slots and blocks."""
        waiting = self._waiting.work
        if not waiting.tokens:
            return waiting
        positions = self._pool.free * self.config.block_size
        share = min(1.0, len(self._free_slots) / len(self._waiting), positions / waiting.tokens)
        return StepWork(*(int(part * share) for part in waiting))

    def _plan_chunk(self, draft: PlanDraft, sequence: Sequence, allowance: StepAllowance) -> bool:
        """A further chunk of a sequence that is being prefilled, if there are blocks for it; False
        if the step can take no more."""
        start = sequence.planned_positions
        room = (len(sequence.blocks) + self._pool.free) * self.config.block_size - start
        if room == 0:
            self._make_room(sequence)
            return True
        to_report = draft.room_to_report(sequence)
        if not to_report:
            # As above.
            return True
        wanted = min(room, sequence.prefill_left, to_report)
        count = allowance.take(start, wanted, sequence.wants_prompt_logprobs)
        if count == 0:
            return False
        self._add_chunk(draft, sequence, count)
        return True

    def _add_chunk(self, draft: PlanDraft, sequence: Sequence, count: int) -> None:
        appended = self._append_blocks(draft, sequence, count)
        assert appended, "a chunk was planned without blocks for it"
        last = draft.add_chunk(sequence, count)
        self._cache.chunk_planned(sequence)
        if last:
            self._prefilling.remove(sequence)
            self._groups.join(sequence, draft.group)

    # Who runs

    def _wait(self, sequence: Sequence) -> None:
        """Put it in line; what the prefix cache has of it now counts as done."""
        cached = len(self._cache.find(sequence)) * self.config.block_size
        self._waiting.push(sequence, sequence.length - cached)

    def _admit(self, draft: PlanDraft, sequence: Sequence, cached: list[int]) -> None:
        self._waiting.remove(sequence)
        self._pool.share(cached)
        slot = self._free_slots.pop()
        computed = len(cached) * self.config.block_size
        sequence.slot = slot
        sequence.known = sequence.prompt + sequence.outputs
        sequence.blocks = list(cached)
        sequence.published = len(cached)
        sequence.planned_positions = computed
        sequence.newest_sample = None
        if sequence.admitted_at is None:
            sequence.admitted_at = self._clock()
            sequence.cached_tokens = computed
            self._cache.first_admitted(sequence, computed)
        insort(self._prefilling, sequence, key=by_rank)
        rules = self._rules.number(sequence.rules, draft.rules)
        outputs = list(sequence.outputs)
        draft.admitted.append(
            Admission(slot, sequence.prompt, outputs, computed, sequence.sampling, rules)
        )
        if cached:
            draft.appended.append(BlocksAppended(slot, cached))

    def _stop_running(self, sequence: Sequence) -> None:
        """Take a sequence out of the running; the next plan to be sent gives back what it holds."""
        if sequence.microbatch is None:
            self._prefilling.remove(sequence)
        else:
            self._groups.leave(sequence)
        self._releasing.append(sequence)

    def _release(self) -> list[int]:
        """Slots that this plan releases; they and their blocks serve from the next plan on."""
        released = []
        for sequence in self._releasing:
            assert sequence.slot is not None
            released.append(sequence.slot)
            self._free_slots.append(sequence.slot)
            self._pool.give_back(sequence.blocks)
            sequence.slot, sequence.blocks = None, []
        self._releasing.clear()
        return released

    # Blocks

    def _append_blocks(self, draft: PlanDraft, sequence: Sequence, tokens: int) -> bool:
        """Blocks for the next tokens; False, with room on the way, if there are not enough."""
        missing = self.config.blocks_for(sequence.planned_positions + tokens) - len(sequence.blocks)
        if missing > self._pool.free:
            self._make_room(sequence)
            return False
        if missing > 0:
            assert sequence.slot is not None
            blocks = self._pool.take(missing)
            sequence.blocks.extend(blocks)
            draft.appended.append(BlocksAppended(sequence.slot, blocks))
        return True

    def _make_room(self, sequence: Sequence) -> None:
        """Preempt the newest sequence, unless that is this one, which then waits its turn."""
        if self._releasing:
            # Somebody's blocks come back with this plan.
            return
        newest = max([*self._prefilling, *self._groups.all()], key=by_rank)
        if newest is not sequence:
            self._stop_running(newest)
            self._wait(newest)
            self.counters.preemptions += 1

    def _has_room_for(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether its whole prefill fits, with what others still need for theirs and a block for
        each row that decodes: admitting a sequence is not to preempt it soon after."""
        promised = sum(
            self.config.blocks_for(len(s.known)) - len(s.blocks) for s in self._prefilling
        )
        needed = self.config.blocks_for(sequence.length) - len(cached)
        return needed + promised + self._groups.decoding <= self._pool.free_after_sharing(cached)
