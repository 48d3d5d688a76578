"""Turns running sequences into plans, up to `window` steps ahead of the newest result."""

import time
from bisect import insort
from collections import deque
from collections.abc import Callable

import msgspec

from headrace.engine.counters import Counters
from headrace.engine.limits import SchedulerConfig
from headrace.engine.microbatch_count import steps_in_a_round
from headrace.engine.microbatches import Microbatches
from headrace.engine.plan_draft import PlanDraft, StepInFlight
from headrace.engine.prefill_order import PrefillOrder, ShortestFirst
from headrace.engine.prefill_policy import StepAllowance, prefill_policy
from headrace.engine.request import FinishReason, Sequence
from headrace.engine.room import Room
from headrace.engine.shared_rules import RulesOnStage
from headrace.engine.situation import situation_of
from headrace.engine.step_cost import NO_WORK, PRIOR, StepCost, StepWork
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
        # In the order of arrival, as they came.
        self._aside: dict[Sequence, None] = {}
        self._begin(config.epoch, config.num_microbatches)

    def _begin(self, epoch: int, num_microbatches: int) -> None:
        """Everything that is void when an epoch is over, made anew."""
        config = self.config
        self.epoch = epoch
        self._room = Room(config, self.counters)
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
        return self._room.free_blocks

    @property
    def blocks_used(self) -> int:
        """Blocks that sequences own; shared ones count once."""
        return self._room.blocks_used

    @property
    def slots_used(self) -> int:
        """Slots of running sequences, and of those whose release no plan has carried yet."""
        return self.config.max_num_seqs - self._room.free_slots

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot, those preempted or set aside included."""
        return len(self._waiting) + len(self._aside)

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
        return self._groups.decode_work

    def set_microbatches(self, count: int, window: int) -> None:
        """Have so many groups, and so many steps in flight at most, from the next plan on."""
        self._groups.resize(count)
        self._window = window

    @property
    def idle(self) -> bool:
        """Whether nothing waits, runs, is to be released or is on its way."""
        pending = self._releasing or self._rules.unused
        waiting = self._waiting or self._aside
        return not (waiting or self.num_running or pending or self._in_flight)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; raises UsageError if it could never run."""
        request = sequence.request
        self.config.check(len(request.prompt), request.max_outputs)
        self._rules.join(request.rules)
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
            sequence.run = None
            sequence.in_flight = 0
        self._begin(epoch, self._groups.count)
        for sequence in unfinished:
            self._wait(sequence)

    def rows_of(self, step: int) -> list[Sequence]:
        """Whose rows a step carries; none if its result is there, or it was not planned."""
        return next((flight.rows for flight in self._in_flight if flight.step == step), [])

    def set_aside(self, sequence: Sequence) -> None:
        """Let a sequence neither run nor wait until it is taken back; nothing may be in flight."""
        if sequence.run is None:
            self._waiting.remove(sequence)
        else:
            self._stop_running(sequence)
        self._aside[sequence] = None

    def take_back(self, sequence: Sequence) -> None:
        """Let a sequence that was set aside wait, in its old place in line."""
        del self._aside[sequence]
        self._wait(sequence)

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a sequence now, for whatever reason; slot and blocks come back with the next plan."""
        if sequence.finished:
            return
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self._rules.leave(sequence.request.rules)
        if sequence in self._aside:
            del self._aside[sequence]
        elif sequence.run is None:
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
        self._room.cache.step_planned()
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
            token, run = tokens[0], sequence.run
            if run is None:
                self._waiting.remove(sequence)
                sequence.outputs.append(token)
                self._wait(sequence)
            else:
                sequence.outputs.append(token)
                # Spares a call for nearly every token.
                if run.planned_positions // size > run.published:
                    self._room.cache.token_accepted(sequence)
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
            run, request = sequence.run, sequence.request
            assert run is not None
            position = run.planned_positions
            index = position - len(request.prompt)
            if index < len(sequence.outputs):
                token, start = sequence.outputs[index], position
            else:
                assert run.newest_sample is not None
                token, start = run.newest_sample, None
                if token.step > newest or index + 1 >= request.max_outputs:
                    continue
            if run.microbatch is None or (
                position == len(run.blocks) * size and not self._append_blocks(draft, sequence, 1)
            ):
                # Preempted by an older row of this very step, or to wait until there is room.
                continue
            if request.own_report_size and not draft.takes_report(request.own_report_size):
                postponed.append(sequence)
                continue
            draft.add_decode_row(sequence, run, token, start)
        if postponed:
            self._groups.put_first(draft.group, postponed)

    @property
    def _round(self) -> int:
        """Steps in which every group has a turn."""
        return steps_in_a_round(self._groups.count, self.config.num_stages)

    @property
    def _prefill_possible(self) -> bool:
        """Whether there is prefill that a step could take on."""
        return bool(self._prefilling) or bool(self._waiting and self._room.free_slots)

    def _plan_chunks(self, draft: PlanDraft) -> None:
        """Prefill chunks, as much as the policy allows, in the order that shares it out."""
        allowance = self._policy.allow(
            situation_of(
                self.config,
                self._groups,
                self._prefilling,
                self._waiting,
                self._room,
                decode=draft.work,
                cost=self.cost,
                max_step_s=self._max_step_s,
            )
        )
        places = self._room.free_slots
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
            if closed or sequence.in_flight or sequence.run is not None:
                continue
            cached = self._room.cache.find(sequence)
            if self._room.cache.begins_in_this_step(sequence, len(cached)):
                # In the next step more of its beginning is there for free.
                postponed.add(sequence)
                closed = len(postponed) == _MOST_POSTPONED
                continue
            if not self._room.free_slots or not self._has_room_for(sequence, cached):
                closed = True
                continue
            start = len(cached) * self.config.block_size
            to_report = draft.room_to_report(sequence)
            unsent = self._rules.unsent(sequence.request.rules)
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
        if oldest.in_flight or oldest.run is not None:
            # Preempted a moment ago.
            return True
        cached = self._room.cache.find(oldest)
        begins = self._room.cache.begins_in_this_step(oldest, len(cached))
        return not begins and not self._has_room_for(oldest, cached)

    @property
    def _max_step_s(self) -> float | None:
        """What a step may take so that no sequence waits longer than allowed for its next token: a
        group's next step comes after one of each group, and a token passes through all stages."""
        limit = self.config.max_itl_s
        return None if limit is None else limit / self._round

    def _plan_chunk(self, draft: PlanDraft, sequence: Sequence, allowance: StepAllowance) -> bool:
        """A further chunk of a sequence that is being prefilled, if there are blocks for it; False
        if the step can take no more."""
        run = sequence.running
        room = self._room.positions_left(run)
        if room == 0:
            self._make_room(sequence)
            return True
        to_report = draft.room_to_report(sequence)
        if not to_report:
            # As above.
            return True
        wanted = min(room, run.prefill_left, to_report)
        count = allowance.take(run.planned_positions, wanted, sequence.wants_prompt_logprobs)
        if count == 0:
            return False
        self._add_chunk(draft, sequence, count)
        return True

    def _add_chunk(self, draft: PlanDraft, sequence: Sequence, count: int) -> None:
        appended = self._append_blocks(draft, sequence, count)
        assert appended, "a chunk was planned without blocks for it"
        last = draft.add_chunk(sequence, count)
        self._room.cache.chunk_planned(sequence)
        if last:
            self._prefilling.remove(sequence)
            self._groups.join(sequence, draft.group)

    # Who runs

    def _wait(self, sequence: Sequence) -> None:
        """Put it in line; what the prefix cache has of it now counts as done."""
        cached = len(self._room.cache.find(sequence)) * self.config.block_size
        self._waiting.push(sequence, sequence.length - cached)

    def _admit(self, draft: PlanDraft, sequence: Sequence, cached: list[int]) -> None:
        self._waiting.remove(sequence)
        run, request = self._room.admit(sequence, cached), sequence.request
        computed = run.planned_positions
        if sequence.admitted_at is None:
            sequence.admitted_at = self._clock()
            sequence.cached_tokens = computed
            self._room.cache.first_admitted(sequence, computed)
        insort(self._prefilling, sequence, key=by_rank)
        rules = self._rules.number(request.rules, draft.rules)
        outputs = list(sequence.outputs)
        draft.admitted.append(
            Admission(run.slot, request.prompt, outputs, computed, sequence.sampling, rules)
        )
        if cached:
            draft.appended.append(BlocksAppended(run.slot, cached))

    def _stop_running(self, sequence: Sequence) -> None:
        """Take a sequence out of the running; the next plan to be sent gives back what it holds."""
        if sequence.running.microbatch is None:
            self._prefilling.remove(sequence)
        else:
            self._groups.leave(sequence)
        self._releasing.append(sequence)

    def _release(self) -> list[int]:
        """Slots that this plan releases; they and their blocks serve from the next plan on."""
        released = [self._room.release(sequence) for sequence in self._releasing]
        self._releasing.clear()
        return released

    # Blocks

    def _append_blocks(self, draft: PlanDraft, sequence: Sequence, tokens: int) -> bool:
        """Blocks for the next tokens; False, with room on the way, if there are not enough."""
        run = sequence.running
        blocks = self._room.extend(run, tokens)
        if blocks is None:
            self._make_room(sequence)
            return False
        if blocks:
            draft.appended.append(BlocksAppended(run.slot, blocks))
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
        runs = [other.running for other in self._prefilling]
        promised = sum(self.config.blocks_for(len(run.known)) - len(run.blocks) for run in runs)
        return self._room.fits(sequence, cached, promised + self._groups.decoding)
