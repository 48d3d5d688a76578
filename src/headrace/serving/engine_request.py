"""From a request's fields to what the engine is asked for."""

from collections.abc import Mapping
from typing import Any

from headrace.checkpoint.generation_config import SamplingDefaults
from headrace.errors import UsageError
from headrace.sampling_params import SamplingParams
from headrace.serving.access import caller_salt
from headrace.serving.api_errors import ApiError, as_api_error
from headrace.serving.requests import GenerationBody

# Fields that SamplingParams has under the same names.
_SHARED = (
    "frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop", "temperature", "top_p",
    "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "bad_words",
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs",
)  # fmt: skip


def sampling_params(
    body: GenerationBody,
    fields_of: Mapping[str, str],
    *,
    n: int,
    max_tokens: int | None,
    logprobs: int | None,
    defaults: SamplingDefaults,
) -> SamplingParams:
    """What the request asks for; fields that are null take the model's defaults, or
    SamplingParams' where it has none.

    fields_of: SamplingParams' names, with what the request calls them. Raises ApiError naming the
    field for a value out of range.
    """
    given: dict[str, Any] = {
        name: value for name in _SHARED if (value := getattr(body, name)) is not None
    }
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    try:
        return SamplingParams(n=n, logprobs=logprobs, **{"max_tokens": None, **defaults, **given})
    except UsageError as error:
        raise as_api_error(error, fields_of) from error


def salt_of(body: GenerationBody) -> bytes:
    """What parts its blocks from others' in the prefix cache: only requests with the same salt
    find each other's. It is made of the key, unless all keys share the cache, and of the request's
    own cache_salt."""
    return caller_salt.get() + (body.cache_salt or "").encode()


def check_stream_options(body: GenerationBody) -> bool:
    """Whether usage is to be sent in a stream. Raises ApiError for what does not fit."""
    options = body.stream_options
    if options is None:
        return False
    if not body.stream:
        raise ApiError(
            400, "stream_options is for streams: set stream to true", param="stream_options"
        )
    for name in ("include_obfuscation", "continuous_usage_stats"):
        if getattr(options, name):
            raise ApiError(
                400,
                f"stream_options.{name} is not supported: leave it out",
                param=f"stream_options.{name}",
            )
    return bool(options.include_usage)


def check_room(
    prompt_tokens: int, max_tokens: int | None, limit: int, *, prompt_field: str, field: str
) -> None:
    """Raises ApiError for an empty prompt, and if prompt and answer exceed the positions that a
    sequence may have.

    prompt_field, field: the request's fields with the prompt and with max_tokens.
    """
    if not prompt_tokens:
        raise ApiError(400, f"{prompt_field}: there is no token in it", param=prompt_field)
    if prompt_tokens >= limit or prompt_tokens + (max_tokens or 0) > limit:
        asked = "" if max_tokens is None else f" and {max_tokens} for the answer ({field})"
        raise ApiError(
            400,
            f"a sequence may have {limit} tokens (--max-model-len), but the prompt has "
            f"{prompt_tokens}{asked or ', which leaves no room for an answer'}",
            param=field if prompt_tokens < limit else prompt_field,
            code="context_length_exceeded",
        )
