"""Turns running sequences into plans, up to `window` steps ahead of the newest result."""

from collections import deque
from dataclasses import dataclass

from headrace.engine.block_pool import BlockPool
from headrace.engine.request import FinishReason, Sequence, next_input
from headrace.errors import PipelineError, UsageError
from headrace.protocol.messages import Result
from headrace.protocol.plan import Admission, BlocksAppended, Plan, Row, TokenRef, Yield


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of the scheduler; tokens and sequences are counts, window is in steps."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    num_microbatches: int
    window: int
    eos_token_ids: frozenset[int]
    epoch: int = 0


@dataclass(frozen=True)
class AcceptedToken:
    """A token that a result brought for a sequence that was still running."""

    sequence: Sequence
    token: int


@dataclass(frozen=True)
class _InFlight:
    step: int
    rows: list[Sequence]
    yields: list[Yield]


class Scheduler:
    """First come, first served; decode rows before prefill chunks; one plan at a time.

    Sequences that decode belong to one of `num_microbatches` groups, which take turns, so that a
    row's token is back when its group's turn comes. Prefill chunks go into any step.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._pool = BlockPool(config.num_blocks)
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._groups: list[list[Sequence]] = [[] for _ in range(config.num_microbatches)]
        self._releasing: list[Sequence] = []
        self._in_flight: deque[_InFlight] = deque()
        self._turn = 0
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
        """The newest step planned; -1 before the first."""
        return self._next_step - 1

    @property
    def free_blocks(self) -> int:
        """Blocks owned by no sequence."""
        return self._pool.free

    @property
    def idle(self) -> bool:
        """Whether nothing waits, runs, is to be released or is on its way."""
        return not (
            self._waiting
            or self._prefilling
            or any(self._groups)
            or self._releasing
            or self._in_flight
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; raises UsageError if it could never run."""
        length = len(sequence.prompt)
        limit = self._config.max_model_len
        if length == 0:
            raise UsageError("the prompt is empty: give it at least one token")
        if length >= limit:
            raise UsageError(
                f"the prompt has {length} tokens, which leaves no room for output: "
                f"--max-model-len is {limit}"
            )
        sequence.max_outputs = min(sequence.max_outputs, limit - length)
        needed = self._blocks_for(sequence.max_positions)
        if needed > self._pool.num_blocks:
            raise UsageError(
                f"the request needs {needed} cache blocks, the whole cache has "
                f"{self._pool.num_blocks}: lower max_tokens or raise --kv-cache-memory"
            )
        self._waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence now; its slot and blocks come back with the next plan."""
        if not sequence.finished:
            self._finish(sequence, "abort")

    def plan(self) -> Plan | None:
        """The next plan, or None if the window is full or there is nothing to do."""
        if len(self._in_flight) >= self._config.window:
            return None
        admitted = self._admit()
        self._even_out()
        microbatch = self._choose_microbatch()
        decoding = self._groups[microbatch]
        rows: list[Row] = []
        sequences: list[Sequence] = []
        appended: list[BlocksAppended] = []
        budget = self._config.max_num_batched_tokens

        for sequence in decoding:
            if sequence.planned_outputs < sequence.max_outputs:
                self._append_blocks(sequence, 1, appended)
                rows.append(self._decode_row(sequence, len(rows)))
                sequences.append(sequence)
        budget -= len(rows)

        for sequence in list(self._prefilling):
            if budget <= 0:
                break
            count = min(budget, len(sequence.prompt) - sequence.planned_positions)
            self._append_blocks(sequence, count, appended)
            rows.append(self._prefill_row(sequence, count, len(rows)))
            sequences.append(sequence)
            budget -= count
            if sequence.prompt_planned:
                self._prefilling.remove(sequence)
                self._join_microbatch(sequence, microbatch)

        released = self._release()
        if not rows and not released:
            return None
        plan = Plan(
            epoch=self._config.epoch,
            step=self._next_step,
            microbatch=microbatch,
            rows=rows,
            admitted=admitted,
            appended=appended,
            released=released,
        )
        self._in_flight.append(_InFlight(plan.step, sequences, [row.yields for row in rows]))
        self._next_step += 1
        self._turn = (microbatch + 1) % self._config.num_microbatches
        return plan

    def take_result(self, result: Result) -> list[AcceptedToken]:
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
        accepted = []
        for sequence, yields, tokens in zip(flight.rows, flight.yields, result.tokens, strict=True):
            if len(tokens) != (yields is Yield.TOKEN):
                raise PipelineError(
                    f"a row of step {result.step} gave {len(tokens)} tokens against its plan"
                )
            if not tokens or sequence.finished:
                continue
            sequence.outputs.append(tokens[0])
            accepted.append(AcceptedToken(sequence, tokens[0]))
            self._check_stop(sequence, tokens[0])
        return accepted

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self._config.block_size)

    def _admit(self) -> list[Admission]:
        admitted = []
        while self._waiting and self._free_slots:
            sequence = self._waiting[0]
            needed = self._blocks_for(sequence.max_positions)
            if not self._pool.reserve(needed):
                break
            self._waiting.popleft()
            sequence.reserved_blocks = needed
            sequence.slot = self._free_slots.pop()
            self._prefilling.append(sequence)
            admitted.append(
                Admission(
                    slot=sequence.slot,
                    prompt=sequence.prompt,
                    outputs=sequence.outputs,
                    seed=sequence.seed,
                    temperature=sequence.params.temperature,
                )
            )
        return admitted

    def _choose_microbatch(self) -> int:
        """The next group in turn that has a row to run; the turn itself if none has."""
        count = self._config.num_microbatches
        for offset in range(count):
            candidate = (self._turn + offset) % count
            if any(s.planned_outputs < s.max_outputs for s in self._groups[candidate]):
                return candidate
        return self._turn

    def _even_out(self) -> None:
        """Move sequences over where endings left groups uneven by two or more.

        References keep their tokens right; a moved sequence may hold up one step.
        """
        while True:
            sizes = [len(group) for group in self._groups]
            largest, smallest = sizes.index(max(sizes)), sizes.index(min(sizes))
            if sizes[largest] - sizes[smallest] < 2:
                return
            sequence = self._groups[largest].pop()
            sequence.microbatch = smallest
            self._groups[smallest].append(sequence)

    def _join_microbatch(self, sequence: Sequence, current: int) -> None:
        """Join the step's own group unless another is smaller: groups stay even."""
        smallest = min(len(group) for group in self._groups)
        if len(self._groups[current]) > smallest:
            current = next(i for i, g in enumerate(self._groups) if len(g) == smallest)
        sequence.microbatch = current
        self._groups[current].append(sequence)

    def _append_blocks(
        self, sequence: Sequence, tokens: int, appended: list[BlocksAppended]
    ) -> None:
        missing = self._blocks_for(sequence.planned_positions + tokens) - len(sequence.blocks)
        if missing > 0:
            assert sequence.slot is not None
            blocks = self._pool.take(missing)
            sequence.reserved_blocks -= missing
            sequence.blocks.extend(blocks)
            appended.append(BlocksAppended(sequence.slot, blocks))

    def _decode_row(self, sequence: Sequence, row: int) -> Row:
        assert sequence.slot is not None
        token = next_input(sequence)
        start = None if isinstance(token, TokenRef) else sequence.planned_positions
        sequence.planned_positions += 1
        sequence.planned_outputs += 1
        sequence.newest_sample = TokenRef(self._next_step, row)
        return Row(sequence.slot, [token], start, Yield.TOKEN)

    def _prefill_row(self, sequence: Sequence, count: int, row: int) -> Row:
        assert sequence.slot is not None
        start = sequence.planned_positions
        inputs: list[int | TokenRef] = list(sequence.prompt[start : start + count])
        sequence.planned_positions += count
        if not sequence.prompt_planned:
            return Row(sequence.slot, inputs, start, Yield.NOTHING)
        sequence.planned_outputs += 1
        sequence.newest_sample = TokenRef(self._next_step, row)
        return Row(sequence.slot, inputs, start, Yield.TOKEN)

    def _check_stop(self, sequence: Sequence, token: int) -> None:
        params = sequence.params
        if (token in self._config.eos_token_ids and not params.ignore_eos) or (
            token in params.stop_token_ids
        ):
            self._finish(sequence, "stop")
        elif len(sequence.outputs) >= sequence.max_outputs:
            self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        if sequence.slot is None:
            self._waiting.remove(sequence)
            return
        if sequence.microbatch is None:
            self._prefilling.remove(sequence)
        else:
            self._groups[sequence.microbatch].remove(sequence)
        self._releasing.append(sequence)

    def _release(self) -> list[int]:
        """Slots that this plan releases; they and their blocks serve from the next plan on."""
        released = []
        for sequence in self._releasing:
            assert sequence.slot is not None
            released.append(sequence.slot)
            self._free_slots.append(sequence.slot)
            self._pool.give_back(sequence.blocks, sequence.reserved_blocks)
            sequence.slot, sequence.blocks, sequence.reserved_blocks = None, [], 0
        self._releasing.clear()
        return released
