"""A sequence from the engine's side: its tokens, and how far its work is planned."""

from dataclasses import dataclass, field
from typing import Literal

from headrace.engine.shared_rules import SharedRules
from headrace.protocol.messages import TokenLogprobs
from headrace.protocol.plan import Sampling, TokenRef
from headrace.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]
# Why, and the token or string that stopped it, if one of the request's did.
End = tuple[FinishReason, int | str | None]


@dataclass(eq=False, slots=True)
class Sequence:
    """One completion of one request.

    index: which of the request's n completions. prompt: token ids, at least one. sampling: what the
    last stage is told; rules: the long part of it, shared with the request's other completions.
    stop_tokens: params.stop_token_ids, quick to look in. priority: smaller runs first; arrival:
    numbers sequences as they came. outputs: the tokens accepted from results.

    While it has a slot: known: prompt and outputs at its admission, all of which are prefilled.
    planned_positions: positions that are cached or whose forward pass is in some plan.
    newest_sample: the newest token that a plan asked to be sampled. in_flight: rows whose result
    has not arrived.

    salt: what the prefix cache tells its tokens apart by from the same of others. prompt_keys,
    keys: prefix-cache keys of its full blocks of known tokens, as far as worked out: those of
    prompt tokens alone, in one list for all completions of the request, and the rest. published:
    how many of its blocks are in the prefix cache. prompt_logprobs: how many prompt tokens after
    the first have theirs; report_size: log-probabilities in the report on one of them,
    own_report_size: in that on a token that it samples. cached_tokens: positions that its first
    admission found in the prefix cache. expected_prefill: while it waits, the tokens that it will
    probably have to compute. owed_prefill: how many more tokens others had than it while it was
    first in line. queued_at, admitted_at: when it came and when it first had a slot, on the
    scheduler's clock.
    """

    request_id: int
    index: int
    prompt: list[int]
    params: SamplingParams
    sampling: Sampling
    max_outputs: int
    priority: int = 0
    arrival: int = 0
    outputs: list[int] = field(default_factory=list)
    slot: int | None = None
    known: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    planned_positions: int = 0
    newest_sample: TokenRef | None = None
    microbatch: int | None = None
    in_flight: int = 0
    prompt_keys: list[bytes] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    published: int = 0
    prompt_logprobs: int = 0
    cached_tokens: int | None = None
    expected_prefill: int = 0
    owed_prefill: int = 0
    queued_at: float = 0.0
    admitted_at: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    rules: SharedRules | None = None
    stop_tokens: frozenset[int] = frozenset()
    salt: bytes = b""
    report_size: int = 1
    own_report_size: int = 0

    @property
    def finished(self) -> bool:
        """Whether no further token of it will be accepted."""
        return self.finish_reason is not None

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in line: smaller runs first, the largest is preempted first."""
        return (self.priority, self.arrival)

    @property
    def length(self) -> int:
        """Tokens it has, prompt and accepted outputs."""
        return len(self.prompt) + len(self.outputs)

    @property
    def prefill_left(self) -> int:
        """Tokens to be prefilled that are in no plan yet."""
        return len(self.known) - self.planned_positions

    def end_at(self, token: int, eos_token_ids: frozenset[int]) -> End | None:
        """How its newest token ends it, if it does."""
        params, count = self.params, len(self.outputs)
        if count >= params.min_tokens:
            if token in eos_token_ids and not params.ignore_eos:
                return "stop", None
            if token in self.stop_tokens:
                return "stop", token
        return ("length", None) if count >= self.max_outputs else None

    def new_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Those not had before a preemption. entries: of prompt tokens start + 1 and on."""
        new = entries[max(0, self.prompt_logprobs - start) :]
        self.prompt_logprobs += len(new)
        return new

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are asked for and not all there."""
        asked = self.sampling.prompt_logprobs is not None
        return asked and self.prompt_logprobs < len(self.prompt) - 1


def tokens_between(sequence: Sequence, start: int, end: int) -> list[int]:
    """The accepted tokens of prompt and outputs from position start up to, not including, end."""
    offset = len(sequence.prompt)
    outputs = sequence.outputs[max(0, start - offset) : max(0, end - offset)]
    return sequence.prompt[start:end] + outputs
