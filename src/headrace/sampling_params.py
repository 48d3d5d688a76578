"""What a client may ask of the choice of tokens."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from headrace.checks import check_type, unknown_name
from headrace.errors import UsageError

MAX_SEED = 2**63 - 1
# As many completions of one prompt as vLLM allows by default (its VLLM_MAX_N_SEQUENCES).
_MAX_N = 16384
# No context and no vocabulary is longer.
_MAX_COUNT = 2**31 - 1
# vLLM's bounds: lower temperatures than that count as that (its _MAX_TEMP), but for 0, and a bias
# beyond this as this.
_LOWEST_TEMPERATURE = 0.01
_MOST_BIAS = 100.0
# Of all texts of a request together. Every completion is watched for its stop strings, and bad
# words become tokens, of which there may be MOST_BAD_WORD_TOKENS.
_MOST_STOP_CHARACTERS = 8192
MOST_BAD_WORD_TOKENS = 8192
_MOST_BAD_WORD_CHARACTERS = 16 * MOST_BAD_WORD_TOKENS
_LISTS = ("stop", "stop_token_ids", "bad_words")


class _KnownNames(msgspec.StructMeta):
    """Makes an unknown name a UsageError; a Struct by itself raises TypeError."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        known = cls.__struct_fields__
        for name in fields:
            if name not in known:
                raise unknown_name(cls.__name__, "field", name, known)
        return super().__call__(*args, **fields)


class SamplingParams(msgspec.Struct, metaclass=_KnownNames, frozen=True, kw_only=True):
    """How the tokens of one request are chosen, with vLLM's names, meanings and ranges.

    n: completions of the prompt, each with random numbers of its own.
    temperature: 0 takes the likeliest token, above 0 draws from softmax(logits / temperature);
        below 0.01 counts as 0.01.
    min_p: leave out tokens less likely than min_p times the likeliest one; 0 leaves out none.
    top_k: leave out all but the top_k likeliest tokens; 0 or -1 leaves out none.
    top_p: of what min_p and top_k left, take the fewest likeliest tokens whose probabilities sum
        up to top_p.
    repetition_penalty: divides positive logits of tokens that are in the prompt or the output, and
        multiplies negative ones. frequency_penalty: taken off a token's logit for each time it is
        in the output. presence_penalty: taken off once if it is there at all.
    logit_bias: what to add to the logits of some token ids; beyond 100 and -100 counts as those.
    bad_words: texts that must not come about in the output; 131,072 characters and 8,192 tokens in
        all.
    seed: fixes the random numbers of this request; None or -1 derives one from the engine's seed.
    max_tokens: at most so many output tokens; None for as many as the model has room for.
    min_tokens: no end-of-text token and none of stop_token_ids before so many output tokens.
    stop: text or texts that end the output, 8,192 characters in all. include_stop_str_in_output:
        leave them at its end.
    stop_token_ids: output tokens that end it, besides the model's end-of-text tokens.
    ignore_eos: go on after an end-of-text token.
    skip_special_tokens: the text leaves out special tokens.
    logprobs, prompt_logprobs: for each output or prompt token, report the log-probabilities of so
        many of the likeliest tokens and of the token itself; -1 for the whole vocabulary.

    stop, stop_token_ids and bad_words may be given as None or as lists, and become tuples without
    repetitions.
    Raises UsageError (a ValueError) that names field, value and range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for name in _LISTS:
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, ())
        # msgspec checks types when it decodes, not when Python code builds the object.
        for field in msgspec.structs.fields(type(self)):
            check_type(field.name, getattr(self, field.name), field.type)
        # The caller may change its own lists later.
        for name in _LISTS:
            unlike = tuple(dict.fromkeys(getattr(self, name)))
            msgspec.structs.force_setattr(self, name, unlike)
        if self.seed == -1:
            msgspec.structs.force_setattr(self, "seed", None)
        if 0.0 < self.temperature < _LOWEST_TEMPERATURE:
            msgspec.structs.force_setattr(self, "temperature", _LOWEST_TEMPERATURE)
        self._check_choice()
        self._check_ends()
        self._check_texts()
        self._check_tokens()

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without any random number."""
        return self.temperature == 0

    def _check_choice(self) -> None:
        _check_range("temperature", self.temperature, 0, 2)
        _check_range("n", self.n, 1, _MAX_N)
        if self.greedy and self.n > 1:
            raise UsageError(
                f"n must be 1 when using greedy sampling (temperature {self.temperature:g}), "
                f"not {self.n}: all would be the same"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        _check_range("top_k", self.top_k, -1, _MAX_COUNT)
        _check_range("min_p", self.min_p, 0, 1)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise UsageError(
                f"repetition_penalty must be finite and above 0, not {self.repetition_penalty}"
            )
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            _check_range("seed", self.seed, -MAX_SEED - 1, MAX_SEED)

    def _check_ends(self) -> None:
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, _MAX_COUNT)
        most = _MAX_COUNT if self.max_tokens is None else self.max_tokens
        also = "" if self.max_tokens is None else "(max_tokens)"
        _check_range("min_tokens", self.min_tokens, 0, most, also)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, -1, _MAX_COUNT)

    def _check_texts(self) -> None:
        for name, most in (
            ("stop", _MOST_STOP_CHARACTERS),
            ("bad_words", _MOST_BAD_WORD_CHARACTERS),
        ):
            texts = getattr(self, name)
            if "" in texts:
                raise UsageError(f"{name} {texts!r}: no text in it may be empty")
            characters = sum(map(len, texts))
            if characters > most:
                raise UsageError(
                    f"{name} may have {most} characters in all its texts together, not {characters}"
                )
            for text in texts:
                try:
                    text.encode()
                except UnicodeEncodeError:
                    raise UsageError(f"{name} {text!r}: not valid Unicode text") from None

    def _check_tokens(self) -> None:
        # Nothing is called for each entry: there may be one for every token of the vocabulary.
        _check_each("stop_token_ids: each", self.stop_token_ids)
        if not self.logit_bias:
            return
        _check_each("logit_bias: each token id", self.logit_bias)
        biases = self.logit_bias.values()
        if any(map(math.isnan, biases)):
            token = next(token for token, bias in self.logit_bias.items() if math.isnan(bias))
            raise UsageError(f"logit_bias: the value of token {token} must not be nan")
        bounded = dict(self.logit_bias)
        if min(biases) < -_MOST_BIAS or max(biases) > _MOST_BIAS:
            for token, bias in self.logit_bias.items():
                if not -_MOST_BIAS <= bias <= _MOST_BIAS:
                    bounded[token] = _MOST_BIAS if bias > 0 else -_MOST_BIAS
        msgspec.structs.force_setattr(self, "logit_bias", bounded)


def _check_each(name: str, tokens: Collection[int]) -> None:
    if tokens:
        for token in (min(tokens), max(tokens)):
            _check_range(name, token, 0, _MAX_COUNT)


def _check_range(name: str, value: float, low: float, high: float, also: str = "") -> None:
    """Written so that a NaN is outside."""
    if not low <= value <= high:
        bounds = f"from {low} to {high} {also}".rstrip()
        raise UsageError(f"{name} must be {bounds}, not {value}")
