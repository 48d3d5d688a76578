"""A plan: everything the ranks need to know about one step (contract 1)."""

import enum

import msgspec
from msgspec.structs import replace


class TokenRef(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An input token not known to the engine yet: what row `row` of step `step` sampled."""

    step: int
    row: int


class Yield(enum.IntFlag):
    """What a row gives back besides its place in the KV cache.

    TOKEN: one sampled after its last input. PROMPT_LOGPROBS: log-probabilities of the prompt token
    that follows each of its inputs, where one does.
    """

    NOTHING = 0
    TOKEN = 1
    PROMPT_LOGPROBS = 2


class Row(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One sequence's share of a step: `inputs` go to consecutive positions of its slot.

    start is the absolute position of the first input. None means "one past the newest position
    of this slot": so it is for rows that begin with a reference.
    """

    slot: int
    inputs: list[int | TokenRef]
    start: int | None
    yields: Yield


class Sampling(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What the last stage needs to choose a sequence's tokens, worked out by the engine.

    Meanings are those of SamplingParams; top_k is 0 for none. logprobs, prompt_logprobs: how many
    of the likeliest tokens to report besides the token itself, -1 for the whole vocabulary, None
    for no report.
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class TokenRules(msgspec.Struct, array_like=True, frozen=True):
    """What is long in the choice of tokens: sent once for all completions that go by it.

    number: what admissions call it, used once in an epoch. bad_words: token sequences, none empty,
    of which no output may contain one. logit_bias: what to add to the logits of which tokens.
    end_tokens: those that may not come before Sampling.min_tokens outputs.
    """

    number: int
    bad_words: list[list[int]] = []
    logit_bias: dict[int, float] = {}
    end_tokens: list[int] = []


class Admission(msgspec.Struct, array_like=True, frozen=True):
    """A sequence takes a slot, from this step on.

    prompt and outputs are its tokens so far (outputs: after a preemption); the next token it
    samples has the index len(outputs), which with the seed fixes its random number. computed: how
    many positions the blocks appended in this plan hold already (prefix cache). sampling and rules,
    the number of the TokenRules if it goes by some, are for the last stage alone: the others are
    told None.
    """

    slot: int
    prompt: list[int]
    outputs: list[int]
    computed: int
    sampling: Sampling | None
    rules: int | None = None


class BlocksAppended(msgspec.Struct, array_like=True, frozen=True):
    """Blocks added at the end of a slot's block table, before this step's rows run."""

    slot: int
    blocks: list[int]


class Plan(msgspec.Struct, tag="plan", array_like=True, frozen=True):
    """One step. Ranks apply, in this order: rules, admitted, appended, rows, released, dropped.

    What plan n releases may be given out again by plan n + 1. Without rows no tensor moves, but
    the step has a number and a result like any other.

    rules, dropped: TokenRules that admissions refer to from now on, and the numbers of those to
    which none does any more; for the rank alone that samples.
    """

    epoch: int
    step: int
    microbatch: int
    rows: list[Row]
    admitted: list[Admission]
    appended: list[BlocksAppended]
    released: list[int]
    rules: list[TokenRules] = []
    dropped: list[int] = []


def without_choice(plan: Plan) -> Plan:
    """The plan as ranks are sent it that do not sample: the same, but for how tokens are chosen."""
    if not (plan.admitted or plan.rules or plan.dropped):
        return plan
    admitted = [replace(admission, sampling=None, rules=None) for admission in plan.admitted]
    return replace(plan, admitted=admitted, rules=[], dropped=[])


def token_count(plan: Plan) -> int:
    """How many input tokens the step carries: the rows of the activations on every edge."""
    return sum(len(row.inputs) for row in plan.rows)


# The values that contain TOKEN. There is one object for each, and comparing objects takes a
# twentieth of the time of the flags' own arithmetic, row by row.
_TOKEN, _TOKEN_AND_PROMPT_LOGPROBS = Yield.TOKEN, Yield.TOKEN | Yield.PROMPT_LOGPROBS


def row_samples(row: Row) -> bool:
    """Whether the row yields a token."""
    return row.yields is _TOKEN or row.yields is _TOKEN_AND_PROMPT_LOGPROBS


def samples(plan: Plan) -> bool:
    """Whether the step has token feedback: some row yields a token."""
    return any(row_samples(row) for row in plan.rows)


def referenced_steps(plan: Plan) -> list[int]:
    """The steps whose feedback this plan's inputs refer to, ascending."""
    return sorted(
        {token.step for row in plan.rows for token in row.inputs if isinstance(token, TokenRef)}
    )
