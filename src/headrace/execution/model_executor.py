"""A stage's model with its per-slot state: turns plans into batches and runs them."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from headrace.execution.executor import PlanOrderError
from headrace.kernels.batch import AttentionBatch
from headrace.kernels.exchange import Exchange
from headrace.kernels.kv_cache import bytes_per_block
from headrace.protocol.messages import RowLogprobs, TokenLogprobs
from headrace.protocol.plan import Admission, Plan, Yield, row_samples, token_count
from headrace.protocol.program import Program
from headrace.sampling.rules import SlotRules
from headrace.sampling.sampler import sample, token_logprobs
from headrace.sampling.slot import SlotSampling


class StageModel(Protocol):
    """One stage's part of a model, such as model.interpreter.Interpreter."""

    @property
    def program(self) -> Program: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the caches: one of each of the program's shapes. Comes before all else."""

    def forward(self, inputs: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Ids int64 [T] or activations [T, hidden], overwritten, to activations [T, hidden]."""

    def logits(self, activations: torch.Tensor) -> torch.Tensor:
        """Activations [rows, hidden] to scores [rows, vocab]."""


# Positions whose logits over the whole vocabulary are held at a time, for prompt logprobs.
_PROMPT_LOGPROBS_AT_ONCE = 128


@dataclass
class _Slot:
    """A running sequence on this stage. sampling is there on the rank that samples only."""

    admission: Admission
    sampling: SlotSampling | None
    num_blocks: int = 0


@dataclass(frozen=True)
class _PromptRow:
    """A row of a prompt. first: of its activations. targets: the token that follows each."""

    number: int
    first: int
    targets: list[int]

    @property
    def pieces(self) -> Iterator[slice]:
        """Of the activations, as many at a time as are scored together."""
        for begin in range(0, len(self.targets), _PROMPT_LOGPROBS_AT_ONCE):
            end = min(begin + _PROMPT_LOGPROBS_AT_ONCE, len(self.targets))
            yield slice(self.first + begin, self.first + end)


@dataclass
class ModelExecutor:
    """Runs a stage's model. The KV cache belongs to it; block ids are the same on all stages.

    num_blocks and block_size are the cache's; max_blocks bounds one slot's block table. samples:
    whether this rank chooses tokens, and tells of them; other shards of the last stage only do
    their part of the scores. exchange: with the other shards, each of which receives and sends a
    part of the activations, so that all of them cross an edge once.
    """

    model: StageModel
    max_num_seqs: int
    num_blocks: int
    block_size: int
    max_blocks: int
    device: torch.device
    samples: bool = True
    exchange: Exchange | None = None
    _block_tables: np.ndarray = field(init=False)
    # By slot, the first position that is not computed yet; -1 for slots that nobody has.
    _next_positions: np.ndarray = field(init=False)
    _slots: dict[int, _Slot] = field(default_factory=dict, init=False)
    # By number; on the rank that samples only.
    _rules: dict[int, SlotRules] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.model.allocate(self.num_blocks, self.block_size)
        self._block_tables = np.zeros((self.max_num_seqs, self.max_blocks), dtype=np.int64)
        self._next_positions = np.full(self.max_num_seqs, -1, dtype=np.int64)

    def forget(self) -> None:
        """Empty all slots, and forget all rules. What the cache holds is never read: every position
        is written in the new epoch before it is attended to."""
        self.synchronize()
        self._next_positions.fill(-1)
        self._slots.clear()
        self._rules.clear()

    @property
    def asynchronous(self) -> bool:
        """Whether the device computes while the host goes on."""
        return self.device.type != "cpu"

    def synchronize(self) -> None:
        """Return once the device has done everything that it was given."""
        if self.asynchronous:
            torch.accelerator.synchronize(self.device)

    def begin(self, plan: Plan) -> None:
        """Apply the plan's rules, admissions and appended blocks."""
        for rules in plan.rules:
            if rules.number in self._rules:
                raise PlanOrderError(f"the plan brings rules {rules.number} a second time")
            self._rules[rules.number] = SlotRules(rules, self.model.program.vocab_size)
        for admission in plan.admitted:
            self._admit(admission)
        for appended in plan.appended:
            slot = self._slot(appended.slot)
            end = slot.num_blocks + len(appended.blocks)
            self._block_tables[appended.slot, slot.num_blocks : end] = appended.blocks
            slot.num_blocks = end

    def forward(self, plan: Plan, inputs: torch.Tensor) -> torch.Tensor:
        """Run the stage's layers: activations [tokens, hidden]."""
        if self.exchange is not None and inputs.is_floating_point():
            inputs = self.exchange.gather_parts(inputs, self._new_activations(token_count(plan)))
        return self.model.forward(inputs, self._batch(plan))

    def logits(self, plan: Plan, activations: torch.Tensor) -> torch.Tensor:
        """Scores [sampling rows, vocab], each after its row's last token."""
        ends = itertools.accumulate(len(row.inputs) for row in plan.rows)
        last = [end - 1 for row, end in zip(plan.rows, ends, strict=True) if row_samples(row)]
        if len(last) < len(activations):
            activations = activations[last]
        return self.model.logits(activations)

    def sample(self, plan: Plan, logits: torch.Tensor) -> torch.Tensor:
        """Tokens of the sampling rows, int64 [sampling rows]."""
        return sample(logits, [sampling for _, sampling in self._sampling_rows(plan)])

    def logprobs(
        self,
        plan: Plan,
        activations: torch.Tensor,
        logits: torch.Tensor | None,
        tokens: torch.Tensor | None,
    ) -> list[RowLogprobs]:
        """What rows report besides their tokens, in row order."""
        if not self.samples:
            for rows in self._prompt_rows(plan):
                for some in rows.pieces:
                    self.model.logits(activations[some])
            return []
        sampled = {} if logits is None or tokens is None else self._sampled(plan, logits, tokens)
        prompts = self._prompt_logprobs(plan, activations)
        return [
            RowLogprobs(row, sampled.get(row), prompts.get(row, []))
            for row in sorted(sampled.keys() | prompts.keys())
        ]

    def end(self, plan: Plan) -> None:
        """Apply the plan's releases, and forget the rules that it drops."""
        for number in plan.released:
            self._slot(number)
            del self._slots[number]
            self._next_positions[number] = -1
        for number in plan.dropped:
            if self._rules.pop(number, None) is None:
                raise PlanOrderError(f"the plan drops rules {number}, which are not there")

    def activations_buffer(self, tokens: int) -> torch.Tensor:
        """A new buffer for activations [tokens, hidden] of the model's dtype, or for this shard's
        part of them, flat."""
        if self.exchange is None:
            return self._new_activations(tokens)
        count = self.exchange.part_size(tokens * self.model.program.hidden_size)
        return torch.empty(count, dtype=self.model.dtype, device=self.device)

    def passed_on(self, activations: torch.Tensor) -> torch.Tensor:
        """The activations, or this shard's part of them, flat."""
        return activations if self.exchange is None else self.exchange.part_of(activations)

    def _new_activations(self, tokens: int) -> torch.Tensor:
        return torch.empty(
            tokens, self.model.program.hidden_size, dtype=self.model.dtype, device=self.device
        )

    def _admit(self, admission: Admission) -> None:
        if not 0 <= admission.slot < self.max_num_seqs:
            raise PlanOrderError(f"there is no slot {admission.slot} to give out")
        if admission.slot in self._slots:
            raise PlanOrderError(f"slot {admission.slot} is given out while it is taken")
        # A new object, so that nothing of the slot's former sequence can remain.
        sampling = None
        if self.model.program.head and self.samples:
            rules = None
            if admission.rules is not None:
                rules = self._rules.get(admission.rules)
                if rules is None:
                    raise PlanOrderError(f"the plan names rules {admission.rules}, not there")
            sampling = SlotSampling(admission, self.model.program.vocab_size, rules)
        self._slots[admission.slot] = _Slot(admission, sampling)
        self._next_positions[admission.slot] = admission.computed

    def _sampling_rows(self, plan: Plan) -> Iterator[tuple[int, SlotSampling]]:
        """The rows that sample, by number."""
        for number, row in enumerate(plan.rows):
            if row_samples(row):
                sampling = self._slot(row.slot).sampling
                assert sampling is not None
                yield number, sampling

    def _sampled(
        self, plan: Plan, logits: torch.Tensor, tokens: torch.Tensor
    ) -> dict[int, TokenLogprobs]:
        """By row, the report on its sampled token, where one was asked for."""
        wanted = [
            (place, row, count)
            for place, (row, sampling) in enumerate(self._sampling_rows(plan))
            if (count := sampling.logprobs) is not None
        ]
        if not wanted:
            return {}
        places = [place for place, _, _ in wanted]
        reports = token_logprobs(logits[places], tokens[places], [count for *_, count in wanted])
        return {row: report for (_, row, _), report in zip(wanted, reports, strict=True)}

    def _prompt_logprobs(
        self, plan: Plan, activations: torch.Tensor
    ) -> dict[int, list[TokenLogprobs]]:
        """By row, the reports on the prompt tokens that follow the row's own."""
        found: dict[int, list[TokenLogprobs]] = {}
        for rows in self._prompt_rows(plan):
            sampling = self._slot(plan.rows[rows.number].slot).sampling
            assert sampling is not None
            count = sampling.prompt_logprobs
            assert count is not None
            found[rows.number], done = [], 0
            for some in rows.pieces:
                logits = self.model.logits(activations[some])
                targets = rows.targets[done : done + len(logits)]
                found[rows.number] += token_logprobs(logits, targets, [count] * len(targets))
                done += len(targets)
        return found

    def _prompt_rows(self, plan: Plan) -> Iterator[_PromptRow]:
        """Those whose prompt's log-probabilities are asked for."""
        first = 0
        for number, row in enumerate(plan.rows):
            if row.yields & Yield.PROMPT_LOGPROBS:
                assert row.start is not None
                prompt = self._slot(row.slot).admission.prompt
                targets = prompt[row.start + 1 : row.start + 1 + len(row.inputs)]
                yield _PromptRow(number, first, targets)
            first += len(row.inputs)

    def _slot(self, number: int) -> _Slot:
        slot = self._slots.get(number)
        if slot is None:
            raise PlanOrderError(f"the plan names slot {number}, which nobody has")
        return slot

    def _batch(self, plan: Plan) -> AttentionBatch:
        rows = plan.rows
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        query_lens = [len(row.inputs) for row in rows]
        lengths = np.array(query_lens, dtype=np.int64)
        there = (slots >= 0) & (slots < self.max_num_seqs)
        starts = self._next_positions[np.where(there, slots, 0)]
        taken = there & (starts >= 0)
        if not taken.all():
            slot = int(slots[taken.argmin()])
            raise PlanOrderError(f"the plan names slot {slot}, which nobody has")
        given = np.array([-1 if row.start is None else row.start for row in rows], dtype=np.int64)
        wrong = (given >= 0) & (given != starts)
        if wrong.any():
            row = int(wrong.argmax())
            raise PlanOrderError(
                f"step {plan.step} starts slot {slots[row]} at position {given[row]}, "
                f"it is at {starts[row]}"
            )
        contexts = starts + lengths
        self._next_positions[slots] = contexts
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        positions = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], lengths)
        used = -(-int(contexts.max()) // self.block_size)
        tables = np.ascontiguousarray(self._block_tables[slots, :used])
        blocks = self._block_tables[np.repeat(slots, lengths), positions // self.block_size]
        return AttentionBatch(
            positions=self._tensor(positions),
            cache_index=self._tensor(blocks * self.block_size + positions % self.block_size),
            block_tables=self._tensor(tables),
            query_starts=self._tensor(bounds),
            context_lens=self._tensor(contexts),
            query_lens=query_lens,
            context_list=contexts.tolist(),
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def cache_bytes_per_block(program: Program, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes on this stage, keys and values of all its layers."""
    return sum(
        bytes_per_block(block_size, shape.kv_heads, shape.head_dim, dtype)
        for shape in program.caches
    )
