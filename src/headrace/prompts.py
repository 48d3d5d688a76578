"""What a prompt may be, for `LLM` and `AsyncLLM` alike."""

import operator
from collections.abc import Sequence
from typing import SupportsIndex, cast

from headrace.checkpoint.tokenizer import Message, Tokenizer
from headrace.errors import UsageError
from headrace.protocol.sampling_params import SamplingParams

Prompt = str | Sequence[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list; raises UsageError for anything else."""
    if isinstance(prompts, str) or (prompts and _is_ids(prompts)):
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, list | tuple):
        raise UsageError(f"a prompt is a text or a list of token ids, not {prompts!r}")
    for item in prompts:
        if not isinstance(item, str) and not _is_ids(item):
            raise UsageError(f"a prompt is a text or a list of token ids, not {item!r}")
    return list(prompts)


def as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts; raises UsageError if they do not match."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple) or not all(
        isinstance(p, SamplingParams) for p in params
    ):
        raise UsageError(
            f"sampling_params must be SamplingParams or a list of them, not {params!r}"
        )
    if len(params) != count:
        raise UsageError(f"{len(params)} sampling parameters were given for {count} prompts")
    return list(params)


def as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[list[Message]]:
    """One conversation or several as a list; raises UsageError for anything else."""
    if isinstance(messages, list | tuple) and messages:
        conversations = [messages] if isinstance(messages[0], dict) else messages
        if all(_is_conversation(c) for c in conversations):
            return [list(cast(Sequence[Message], c)) for c in conversations]
    raise UsageError(
        "messages must be a list of {'role': ..., 'content': ...} with texts for values, "
        f"or a list of such lists, not {messages!r}"
    )


def token_ids(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """The prompt's tokens; raises UsageError for text that is not valid Unicode."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return [operator.index(token) for token in prompt]


def _is_ids(prompt: object) -> bool:
    """Whether it is a list of whole numbers, numpy's among them; a truth value is none."""
    return isinstance(prompt, list | tuple) and all(
        isinstance(token, SupportsIndex) and not isinstance(token, bool) for token in prompt
    )


def _is_conversation(messages: object) -> bool:
    return (
        isinstance(messages, list | tuple)
        and bool(messages)
        and all(
            isinstance(message, dict)
            and {"role", "content"} <= message.keys()
            and all(isinstance(value, str) for value in message.values())
            for message in messages
        )
    )
