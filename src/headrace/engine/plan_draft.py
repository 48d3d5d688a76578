"""The plan that is being made, row by row, and what is kept of it until its result arrives."""

from dataclasses import dataclass, field

from headrace.engine.request import Run, Sequence
from headrace.engine.step_cost import StepWork, chunk_attended
from headrace.errors import PipelineError
from headrace.protocol.messages import Result, RowLogprobs
from headrace.protocol.plan import (
    Admission,
    BlocksAppended,
    Plan,
    Row,
    TokenRef,
    TokenRules,
    Yield,
)

# Log-probabilities that a step may report of what it prefills, and again of what it decodes, but
# for a single position's, which may be more (the whole vocabulary's): each takes some 100 bytes on
# the last stage, twice that in the engine.
MOST_REPORTED = 2**17
# What a step may bring of rules (SharedRules.size), but for a single request's, which may be
# more: the last stage takes some 10 ms to make so many ready.
MOST_RULES = 2**15


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step without result yet. samples: which rows yield a token. starts: the first position of
    each row that yields prompt logprobs."""

    step: int
    rows: list[Sequence]
    samples: list[bool]
    starts: dict[int, int]

    def reports(self, result: Result) -> dict[int, tuple[RowLogprobs, int]]:
        """By row, its report, if it has one, and the first position of the prompt logprobs in it.

        Raises PipelineError if the result does not fit the plan.
        """
        # All at once: it is done for every row of every step.
        given = list(map(len, result.tokens))
        if given != self.samples:
            raise PipelineError(
                f"the result of step {self.step} does not fit its plan: {sum(given)} tokens in "
                f"{len(given)} rows, planned were {sum(self.samples)} in {len(self.samples)}"
            )
        return {entry.row: (entry, self.starts.get(entry.row, 0)) for entry in result.logprobs}


@dataclass(slots=True)
class PlanDraft:
    """Keeps what sequences have planned in step with the rows it is given.

    group: whose turn it is; decode_rows: how many of the rows decode, all of that group. chunks:
    the tokens of each sequence whose prefill the step carries.
    """

    step: int
    group: int = 0
    decode_rows: int = 0
    chunks: dict[Sequence, int] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    appended: list[BlocksAppended] = field(default_factory=list)
    rules: list[TokenRules] = field(default_factory=list)
    _tokens: int = 0
    # Log-probabilities: of decode rows; of chunks. And the prompts' positions that have some.
    _decode_reported: int = 0
    _reported: int = 0
    _rules_sent: int = 0
    _reported_positions: int = 0
    _attended: int = 0
    _sequences: list[Sequence] = field(default_factory=list)
    _samples: list[bool] = field(default_factory=list)
    _starts: dict[int, int] = field(default_factory=dict)

    def add_decode_row(
        self, sequence: Sequence, run: Run, token: int | TokenRef, start: int | None
    ) -> None:
        """A row with one token of a sequence's run; start is its position, None for a reference."""
        rows = self.rows
        run.newest_sample = TokenRef(self.step, len(rows))
        rows.append(Row(run.slot, [token], start, Yield.TOKEN))
        run.planned_positions += 1
        sequence.in_flight += 1
        self._sequences.append(sequence)
        self._samples.append(True)
        self.decode_rows += 1
        self._tokens += 1
        self._attended += run.planned_positions

    def add_chunk(self, sequence: Sequence, count: int) -> bool:
        """A row with the next `count` known tokens; whether that was the last of the prefill."""
        run, request = sequence.running, sequence.request
        start = run.planned_positions
        end = start + count
        last = end == len(run.known)
        yields = Yield.TOKEN if last else Yield.NOTHING
        if sequence.wants_prompt_logprobs and start < len(request.prompt) - 1:
            yields |= Yield.PROMPT_LOGPROBS
            self._starts[len(self.rows)] = start
            self._reported += count * request.report_size
            self._reported_positions += min(count, len(request.prompt) - 1 - start)
        if last:
            self._reported += request.own_report_size
        inputs: list[int | TokenRef] = list(run.known[start:end])
        self.rows.append(Row(run.slot, inputs, start, yields))
        run.planned_positions = end
        if last:
            run.newest_sample = TokenRef(self.step, len(self.rows) - 1)
        sequence.in_flight += 1
        self._sequences.append(sequence)
        self._samples.append(last)
        self.chunks[sequence] = count
        self._tokens += count
        self._attended += chunk_attended(start, count)
        return last

    def room_to_report(self, sequence: Sequence) -> int:
        """How many of a sequence's tokens the step may take on, for what it reports of them."""
        room = MOST_REPORTED - self._reported
        if not sequence.wants_prompt_logprobs:
            own = sequence.request.own_report_size
            return 0 if own and self._reported and own > room else sequence.length
        return max(room // sequence.request.report_size, 0 if self._reported else 1)

    def takes_report(self, size: int) -> bool:
        """Make room for so many log-probabilities of a decode row; False if there is none."""
        reported = self._decode_reported
        if reported and reported + size > MOST_REPORTED:
            return False
        self._decode_reported += size
        return True

    def takes_rules(self, unsent: int) -> bool:
        """Make room for rules, of this size, that an admission brings the last stage; False if
        there is none."""
        if unsent and self._rules_sent and self._rules_sent + unsent > MOST_RULES:
            return False
        self._rules_sent += unsent
        return True

    @property
    def work(self) -> StepWork:
        """What the step carries so far."""
        return StepWork(self._tokens, self._attended, sum(self._samples) + self._reported_positions)

    def plan(self, epoch: int, released: list[int], dropped: list[int]) -> Plan:
        """The plan, complete."""
        return Plan(
            epoch=epoch,
            step=self.step,
            microbatch=self.group,
            rows=self.rows,
            admitted=self.admitted,
            appended=self.appended,
            released=released,
            rules=self.rules,
            dropped=dropped,
        )

    def in_flight(self) -> StepInFlight:
        """What its result has to be matched with."""
        return StepInFlight(self.step, self._sequences, self._samples, self._starts)
