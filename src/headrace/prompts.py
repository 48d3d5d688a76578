"""What a prompt may be, for `LLM` and `AsyncLLM` alike."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, SupportsIndex

import msgspec

from headrace.checkpoint.chat_template import Message
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.checks import shortened
from headrace.conversation import render_conversation
from headrace.errors import UsageError
from headrace.sampling_params import SamplingParams

# As in vLLM: a text, token ids, or a dict with one of them, which may also have a cache_salt.
Prompt = str | Sequence[int] | dict[str, Any]


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as the engine takes it; text is None if it was given as token ids.

    salt: of its blocks in the prefix cache.
    """

    text: str | None
    token_ids: list[int]
    salt: bytes = b""


def as_prompts(prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer) -> list[TokenizedPrompt]:
    """One prompt or several, tokenized; raises UsageError for anything else, naming which."""
    if isinstance(prompts, str | dict) or (_is_ids(prompts) and prompts):
        return [_tokenized(prompts, "the prompt", tokenizer)]
    if not isinstance(prompts, list | tuple):
        raise UsageError(_no_prompt("a prompt", prompts))
    return [_tokenized(item, f"prompt {n}", tokenizer) for n, item in enumerate(prompts)]


def as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts, the default one if none are given; raises
    UsageError if they do not match."""
    if params is None:
        return [default] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple) or not all(
        isinstance(p, SamplingParams) for p in params
    ):
        raise UsageError(
            f"sampling_params must be SamplingParams or a list of them, not {shortened(params)}"
        )
    if len(params) != count:
        raise UsageError(f"{len(params)} sampling parameters were given for {count} prompts")
    return list(params)


def as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """One conversation or several as a list; raises UsageError for anything else."""
    if not isinstance(messages, list | tuple) or not messages:
        raise UsageError(
            "messages must be a list of {'role': ..., 'content': ...}, or a list of such lists, "
            f"not {shortened(messages)}"
        )
    if not isinstance(messages[0], list | tuple):
        return [messages]
    return list(messages)


def tokenized_chat(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    max_model_len: int,
    add_generation_prompt: bool = True,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> TokenizedPrompt:
    """A conversation by the model's chat template, which brings its own special tokens; otherwise
    as render_conversation. Raises UsageError also for options that are no JSON values."""
    try:
        values = msgspec.json.decode(msgspec.json.encode(dict(options)))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"chat_template_kwargs must have JSON values: {error}") from None
    text = render_conversation(messages, tokenizer, max_model_len, add_generation_prompt, values)
    return TokenizedPrompt(text, tokenizer.encode(text, add_special_tokens=False))


def _tokenized(prompt: Any, name: str, tokenizer: Tokenizer) -> TokenizedPrompt:
    given = prompt
    salt = ""
    if isinstance(prompt, dict):
        fields = {key: value for key, value in prompt.items() if key != "cache_salt"}
        if fields.keys() in ({"prompt"}, {"prompt_token_ids"}):
            salt = prompt.get("cache_salt", "")
            (prompt,) = fields.values()
    if not isinstance(salt, str):
        raise UsageError(f"{name}: cache_salt must be a text, not {shortened(salt)}")
    root = salt.encode(errors="surrogatepass")
    if isinstance(prompt, str):
        return TokenizedPrompt(prompt, tokenizer.encode(prompt), root)
    if not _is_ids(prompt):
        raise UsageError(_no_prompt(name, given))
    return TokenizedPrompt(None, [operator.index(token) for token in prompt], root)


def _no_prompt(name: str, value: object) -> str:
    return f"{name} must be a text or a list of token ids, not {shortened(value)}"


def _is_ids(prompt: object) -> bool:
    """Whether it is a list of whole numbers, numpy's among them; a truth value is none."""
    return isinstance(prompt, list | tuple) and all(_is_whole(token) for token in prompt)


def _is_whole(token: object) -> bool:
    if isinstance(token, bool) or not isinstance(token, SupportsIndex):
        return False
    try:
        operator.index(token)
    except TypeError:
        # An array that could be an index only if it had one element.
        return False
    return True
