"""Requests and their sequences from the engine's side: tokens, and how far work is planned."""

from dataclasses import dataclass, field
from typing import Literal

from headrace.engine.shared_rules import SharedRules
from headrace.protocol.messages import TokenLogprobs
from headrace.protocol.plan import Sampling, TokenRef
from headrace.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
# Why, and the token or string that stopped it, if one of the request's did.
End = tuple[FinishReason, int | str | None]


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """What a client asked, shared by its completions.

    prompt: token ids, at least one. max_outputs: tokens that a completion may have. priority:
    smaller runs first. salt: what the prefix cache tells its tokens apart by from the same of
    others. rules: the long part of what the last stage is told. stop_tokens: params.stop_token_ids,
    quick to look in. report_size: log-probabilities in the report on one of its prompt tokens,
    own_report_size: in that on a token that it samples. prompt_keys: prefix-cache keys of full
    blocks of prompt tokens, as far as worked out.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    max_outputs: int
    priority: int = 0
    salt: bytes = b""
    rules: SharedRules | None = None
    stop_tokens: frozenset[int] = frozenset()
    report_size: int = 1
    own_report_size: int = 0
    prompt_keys: list[bytes] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Run:
    """A sequence's time in a slot: made when it is admitted, and gone with the slot or the epoch.

    known: prompt and outputs at its admission, all of which are prefilled. blocks: of the cache, in
    the order of positions; published: how many of them the prefix cache has. planned_positions:
    positions that are cached or whose forward pass is in some plan. newest_sample: the newest token
    that a plan asked to be sampled. microbatch: its group, once it decodes.
    """

    slot: int
    known: list[int]
    blocks: list[int]
    published: int
    planned_positions: int
    newest_sample: TokenRef | None = None
    microbatch: int | None = None

    @property
    def prefill_left(self) -> int:
        """Tokens to be prefilled that are in no plan yet."""
        return len(self.known) - self.planned_positions


@dataclass(eq=False, slots=True)
class Sequence:
    """One completion of one request.

    index: which of the request's n completions. sampling: what the last stage is told. arrival:
    numbers sequences as they came. outputs: the tokens accepted from results. run: None while it
    has no slot. in_flight: rows whose result has not arrived, also of a run that is over. keys:
    prefix-cache keys of its full blocks that are not of prompt tokens alone, as far as worked out.
    prompt_logprobs: how many prompt tokens after the first have theirs. cached_tokens: positions
    that its first admission found in the prefix cache. expected_prefill: while it waits, the tokens
    that it will probably have to compute. owed_prefill: how many more tokens others had than it
    while it was first in line. queued_at, admitted_at: when it came and when it first had a slot,
    on the scheduler's clock.
    """

    request: Request
    index: int
    sampling: Sampling
    arrival: int = 0
    outputs: list[int] = field(default_factory=list)
    run: Run | None = None
    in_flight: int = 0
    keys: list[bytes] = field(default_factory=list)
    prompt_logprobs: int = 0
    cached_tokens: int | None = None
    expected_prefill: int = 0
    owed_prefill: int = 0
    queued_at: float = 0.0
    admitted_at: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether no further token of it will be accepted."""
        return self.finish_reason is not None

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in line: smaller runs first, the largest is preempted first."""
        return (self.request.priority, self.arrival)

    @property
    def length(self) -> int:
        """Tokens it has, prompt and accepted outputs."""
        return len(self.request.prompt) + len(self.outputs)

    @property
    def running(self) -> Run:
        """Its run, of a sequence that has one."""
        assert self.run is not None
        return self.run

    def end_at(self, token: int, eos_token_ids: frozenset[int]) -> End | None:
        """How its newest token ends it, if it does."""
        request, count = self.request, len(self.outputs)
        # Hardly ever: so this is asked first.
        if token in eos_token_ids or token in request.stop_tokens:
            params = request.params
            if count >= params.min_tokens:
                if token in eos_token_ids and not params.ignore_eos:
                    return "stop", None
                if token in request.stop_tokens:
                    return "stop", token
        return ("length", None) if count >= request.max_outputs else None

    def new_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Those not had before a preemption. entries: of prompt tokens start + 1 and on."""
        new = entries[max(0, self.prompt_logprobs - start) :]
        self.prompt_logprobs += len(new)
        return new

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are asked for and not all there."""
        asked = self.sampling.prompt_logprobs is not None
        return asked and self.prompt_logprobs < len(self.request.prompt) - 1


def tokens_between(sequence: Sequence, start: int, end: int) -> list[int]:
    """The accepted tokens of prompt and outputs from position start up to, not including, end."""
    prompt = sequence.request.prompt
    offset = len(prompt)
    outputs = sequence.outputs[max(0, start - offset) : max(0, end - offset)]
    return prompt[start:end] + outputs
