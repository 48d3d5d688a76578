"""Turns running sequences into plans, up to `window` steps ahead of the newest result."""

import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace.engine.block_pool import BlockPool
from headrace.engine.microbatches import Microbatches
from headrace.engine.plan_draft import PlanDraft, StepInFlight
from headrace.engine.prefill_policy import (
    PrefillPolicyName,
    Situation,
    StepAllowance,
    prefill_policy,
)
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
from headrace.errors import PipelineError, UsageError
from headrace.protocol.messages import Result, TokenLogprobs
from headrace.protocol.plan import Admission, BlocksAppended, Plan, TokenRef


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler; tokens and sequences are counts, window is in steps.

    num_microbatches and window are those at the start.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    num_microbatches: int
    window: int
    eos_token_ids: frozenset[int]
    prefix_caching: bool = True
    prefill_policy: PrefillPolicyName = "even"
    epoch: int = 0


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
    """First come, first served within a priority; decode rows before prefill chunks.

    Other threads may read counts (steps_in_flight, newest_step, num_*, slots_used, blocks_used,
    prefix_cache_*, preemptions) at any time; between two plans they may be off by what just moves.

    Sequences that decode belong to one of `num_microbatches` groups, which take turns, so that a
    row's token is back when its group's turn comes. Prefill chunks go into any step. When blocks
    run out, the newest sequence is preempted: it loses slot and blocks, to be computed again.
    """

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        # What steps cost the slowest stage: the engine keeps it up to date from reports.
        self.cost: StepCost = PRIOR
        self.newest_work = NO_WORK
        self._clock = clock
        self._pool = BlockPool(config.num_blocks)
        self._policy = prefill_policy(config.prefill_policy)
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._cache = PrefixCache(self._pool, config.block_size, config.prefix_caching)
        self._rules = RulesOnStage()
        self._waiting = WaitingQueue()
        # Ordered by rank.
        self._prefilling: list[Sequence] = []
        self._groups = Microbatches(config.num_microbatches)
        self._window = config.window
        # Those whose slot and blocks the next plan gives back.
        self._releasing: list[Sequence] = []
        self._in_flight: deque[StepInFlight] = deque()
        self._next_step = 0
        self._arrivals = 0
        self.preemptions = 0

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
        """The newest step planned; -1 before the first."""
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
    def prefix_cache_queries(self) -> int:
        """Tokens looked for in the prefix cache so far."""
        return self._cache.queries

    @property
    def prefix_cache_hits(self) -> int:
        """Tokens found there so far."""
        return self._cache.hits

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
        self.check(len(sequence.prompt), sequence.max_outputs)
        sequence.max_outputs = min(
            sequence.max_outputs, self.config.max_model_len - len(sequence.prompt)
        )
        self._rules.join(sequence.rules)
        sequence.arrival = self._arrivals
        sequence.queued_at = self._clock()
        self._arrivals += 1
        self._waiting.push(sequence)

    def check(self, prompt_length: int, max_outputs: int) -> None:
        """Raises UsageError, with the reason, for a sequence that could never run."""
        limit = self.config.max_model_len
        if prompt_length == 0:
            raise UsageError("the prompt is empty: give it at least one token")
        if prompt_length >= limit:
            raise UsageError(
                f"the prompt has {prompt_length} tokens, which leaves no room for output: "
                f"--max-model-len is {limit}"
            )
        needed = self._blocks_for(min(limit, prompt_length + max_outputs) - 1)
        if needed > self._pool.num_blocks:
            raise UsageError(
                f"the request needs {needed} cache blocks, the whole cache has "
                f"{self._pool.num_blocks}: lower max_tokens or raise --kv-cache-memory"
            )

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
        if len(self._in_flight) >= self._window:
            return None
        draft = PlanDraft(self._next_step)
        self._groups.even_out(self.cost)
        self._plan_rows(draft)
        if not (draft.rows or self._releasing or self._rules.unused):
            return None
        self._groups.planned(draft.group, draft.decode_rows)
        self._cache.step_planned()
        plan = draft.plan(self.config.epoch, self._release(), self._rules.drop_unused())
        self._in_flight.append(draft.in_flight())
        self._next_step += 1
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
        if len(result.tokens) != len(flight.rows):
            raise PipelineError(
                f"the result of step {result.step} has {len(result.tokens)} rows, "
                f"its plan had {len(flight.rows)}"
            )
        reports = {entry.row: entry for entry in result.logprobs}
        size = self.config.block_size
        accepted = []
        for row, (sequence, samples, tokens) in enumerate(
            zip(flight.rows, flight.samples, result.tokens, strict=True)
        ):
            if len(tokens) != samples:
                raise PipelineError(
                    f"a row of step {result.step} gave {len(tokens)} tokens against its plan"
                )
            sequence.in_flight -= 1
            if sequence.finish_reason is not None:
                continue
            own, of_prompt = None, None
            if reports and row in reports:
                own = reports[row].sampled
                of_prompt = self._new_prompt_logprobs(
                    sequence, flight.starts.get(row, 0), reports[row].prompt
                )
            if not samples:
                if of_prompt:
                    accepted.append(Accepted(sequence, None, None, of_prompt))
                continue
            (token,) = tokens
            if sequence.slot is None:
                self._waiting.remove(sequence)
                sequence.outputs.append(token)
                self._waiting.push(sequence)
            else:
                sequence.outputs.append(token)
                # Spares a call for nearly every token.
                if sequence.planned_positions // size > sequence.published:
                    self._cache.token_accepted(sequence)
            accepted.append(Accepted(sequence, token, own, of_prompt))
            self._check_stop(sequence, token)
        return accepted

    # What a step carries

    def _plan_rows(self, draft: PlanDraft) -> None:
        """Fill the draft with rows, if possible with none whose token comes late."""
        turns = self._groups.turns()
        if self._prefill_possible:
            # An empty group's turn is not passed over: a chunk fills it.
            draft.group = turns[0]
            self._plan_decode_rows(draft, in_time=True)
            self._plan_chunks(draft)
        for in_time in (True, False):
            for group in turns:
                if draft.rows:
                    return
                draft.group = group
                self._plan_decode_rows(draft, in_time)

    def _plan_decode_rows(self, draft: PlanDraft, in_time: bool) -> None:
        """A row for each member of the group that has room; in_time: whose token is no younger
        than a round of turns, and so will not hold up the others."""
        newest = draft.step - (self._groups.count if in_time else 0)
        size = self.config.block_size
        token: int | TokenRef
        start: int | None
        for sequence in list(self._groups.members(draft.group)):
            position = sequence.planned_positions
            index = position - len(sequence.prompt)
            if index < len(sequence.outputs):
                token, start = sequence.outputs[index], position
            else:
                assert sequence.newest_sample is not None
                token, start = sequence.newest_sample, None
                if token.step > newest or sequence.planned_outputs >= sequence.max_outputs:
                    continue
            if sequence.microbatch is None or (
                position == len(sequence.blocks) * size
                and not self._append_blocks(draft, sequence, 1)
            ):
                # Preempted by an older row of this very step, or to wait until there is room.
                continue
            draft.add_decode_row(sequence, token, start)

    @property
    def _prefill_possible(self) -> bool:
        """Whether there is prefill that a step could take on."""
        return bool(self._prefilling) or bool(self._waiting and self._free_slots)

    def _plan_chunks(self, draft: PlanDraft) -> None:
        """Prefill chunks, as much as the policy allows: of running sequences, then of new ones."""
        allowance = self._policy.allow(self._situation(draft))
        for sequence in list(self._prefilling):
            # Making room for an older one may have preempted it.
            if sequence in self._prefilling and not self._plan_chunk(draft, sequence, allowance):
                return
        postponed = 0
        while self._free_slots and postponed < min(len(self._waiting), _MOST_POSTPONED):
            sequence = self._waiting[postponed]
            if sequence.in_flight or sequence.slot is not None:
                # Preempted a moment ago; whoever came later waits behind it.
                return
            cached = self._cache.find(sequence)
            if self._cache.begins_in_this_step(sequence, len(cached)):
                # In the next step more of its beginning is there for free.
                postponed += 1
                continue
            start = len(cached) * self.config.block_size
            if not self._has_room_for(sequence, cached):
                return
            count = allowance.take(start, sequence.length - start)
            if count == 0:
                return
            self._admit(draft, sequence, cached)
            self._add_chunk(draft, sequence, count)

    def _situation(self, draft: PlanDraft) -> Situation:
        groups = self.decode_work
        running = [
            StepWork(s.prefill_left, chunk_attended(s.planned_positions, s.prefill_left), 1)
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
        )

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
        """A further chunk of a sequence that is being prefilled; False if there was no room."""
        start = sequence.planned_positions
        room = (len(sequence.blocks) + self._pool.free) * self.config.block_size - start
        if room == 0:
            self._make_room(sequence)
            return False
        count = allowance.take(start, min(room, sequence.prefill_left))
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
        sequence.planned_outputs = len(sequence.outputs)
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

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self.config.block_size)

    def _append_blocks(self, draft: PlanDraft, sequence: Sequence, tokens: int) -> bool:
        """Blocks for the next tokens; False, with room on the way, if there are not enough."""
        missing = self._blocks_for(sequence.planned_positions + tokens) - len(sequence.blocks)
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
            self._waiting.push(newest)
            self.preemptions += 1

    def _has_room_for(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether its whole prefill fits, with what others still need for theirs and a block for
        each row that decodes: admitting a sequence is not to preempt it soon after."""
        promised = sum(self._blocks_for(len(s.known)) - len(s.blocks) for s in self._prefilling)
        needed = self._blocks_for(sequence.length) - len(cached)
        return needed + promised + self._groups.decoding <= self._pool.free_after_sharing(cached)

    # Results

    def _new_prompt_logprobs(
        self, sequence: Sequence, start: int, entries: list[TokenLogprobs]
    ) -> list[TokenLogprobs]:
        """Those not had before a preemption. entries: of prompt tokens start + 1 and on."""
        new = entries[max(0, sequence.prompt_logprobs - start) :]
        sequence.prompt_logprobs += len(new)
        return new

    def _check_stop(self, sequence: Sequence, token: int) -> None:
        params = sequence.params
        count = len(sequence.outputs)
        if count >= params.min_tokens:
            if token in self.config.eos_token_ids and not params.ignore_eos:
                self.finish(sequence, "stop")
            elif token in sequence.stop_tokens:
                self.finish(sequence, "stop", token)
        if count >= sequence.max_outputs:
            self.finish(sequence, "length")
