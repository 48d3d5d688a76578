"""What SamplingParams come to for this model: worked out once, away from the engine's thread."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec
from tokenizers import Tokenizer

from headrace.checks import shortened
from headrace.engine.plan_draft import MOST_REPORTED
from headrace.engine.shared_rules import SharedRules
from headrace.engine.stop_strings import StopPatterns
from headrace.errors import UsageError
from headrace.protocol.plan import Sampling
from headrace.sampling_params import MOST_BAD_WORD_TOKENS, SamplingParams


@dataclass(frozen=True, eq=False)
class Prepared:
    """What all completions of all prompts with these parameters share.

    rules, stops: None if there are none. stop_tokens: params.stop_token_ids, quick to look in.
    report_size: log-probabilities that are reported of a prompt token, if any are asked for;
    own_report_size: of a token that is sampled.
    """

    params: SamplingParams
    rules: SharedRules | None
    stops: StopPatterns | None
    stop_tokens: frozenset[int]
    report_size: int
    own_report_size: int


@dataclass(frozen=True)
class Preparation:
    """Prepares parameters, in any thread, for as long as it takes: 30 ms for the longest lists.

    vocab_size bounds token ids. max_logprobs: of one position that a request may ask for, -1 for no
    limit.
    """

    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: Collection[int]
    max_logprobs: int

    def prepare(self, params: SamplingParams) -> Prepared:
        """Raises UsageError for tokens and log-probabilities that there are not, and for too many
        bad words."""
        self.check_tokens("stop_token_ids", params.stop_token_ids)
        self.check_tokens("logit_bias", params.logit_bias or ())
        self._check_logprobs(params)
        return Prepared(
            params,
            self._rules(params),
            StopPatterns(tuple(params.stop)) if params.stop else None,
            frozenset(params.stop_token_ids),
            self._count(params.prompt_logprobs or 0) + 1,
            0 if params.logprobs is None else self._count(params.logprobs) + 1,
        )

    def check_tokens(self, name: str, tokens: Collection[int]) -> None:
        """Raises UsageError for tokens that the vocabulary does not have."""
        size = self.vocab_size
        for token in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= token < size:
                raise UsageError(f"{name} {token} is not in the vocabulary (0 to {size - 1})")

    def _check_logprobs(self, params: SamplingParams) -> None:
        size = self.vocab_size
        limit = size if self.max_logprobs == -1 else min(self.max_logprobs, size)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and (count > limit or (count == -1 and limit < size)):
                raise UsageError(
                    f"{name} must be at most {limit}, the smaller of --max-logprobs and the "
                    f"vocabulary, not {count if count != -1 else '-1 (the whole vocabulary)'}"
                )
        if params.logprobs is not None:
            each = self._count(params.logprobs) + 1
            if params.n > 1 and params.n * each > MOST_REPORTED:
                raise UsageError(
                    f"logprobs: {each} for a token of each of {params.n} completions are more than "
                    f"the {MOST_REPORTED} that a step may report: ask for fewer, or a smaller n"
                )

    def _count(self, logprobs: int) -> int:
        """How many tokens' log-probabilities that are."""
        return self.vocab_size if logprobs == -1 else min(logprobs, self.vocab_size)

    def _rules(self, params: SamplingParams) -> SharedRules | None:
        bad_words = self._tokens_of(params.bad_words)
        ends: set[int] = set()
        if params.min_tokens > 0:
            # Also with ignore_eos, as in vLLM.
            ends.update(params.stop_token_ids, self.eos_token_ids)
        if not (bad_words or params.logit_bias or ends):
            return None
        packed = msgspec.msgpack.encode(bad_words)
        return SharedRules(packed, params.logit_bias or {}, sorted(ends))

    def _tokens_of(self, bad_words: Iterable[str]) -> list[list[int]]:
        """Each word's tokens at the beginning of a text and, where those are as many but others,
        inside one, as in vLLM."""
        result: list[list[int]] = []
        count = 0
        for word in bad_words:
            own, inside = (
                list(self.tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False).ids)
                for prefix in ("", " ")
            )
            if not own:
                raise UsageError(f"bad_words: {word!r} has no token")
            forms = [own]
            if len(inside) == len(own) and inside[0] != own[0]:
                forms.append(inside)
            count += sum(map(len, forms))
            # No longer than it takes to see that they are too many.
            if count > MOST_BAD_WORD_TOKENS:
                raise UsageError(
                    f"bad_words may have {MOST_BAD_WORD_TOKENS} tokens in all its texts together, "
                    f"and it has more: {shortened(word)} is beyond them"
                )
            result += forms
        return result


def stage_sampling(params: SamplingParams, seed: int) -> Sampling:
    """What the last stage is told of params, but for its long lists.

    seed: of this sequence; params.seed is not looked at.
    """
    return Sampling(
        seed=seed,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        min_tokens=params.min_tokens,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )
