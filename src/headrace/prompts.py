"""What a prompt may be, for `LLM` and `AsyncLLM` alike."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, cast

from headrace.checkpoint.tokenizer import Message, Tokenizer
from headrace.errors import UsageError
from headrace.protocol.checks import shortened
from headrace.protocol.sampling_params import SamplingParams

# As in vLLM: a text, token ids, or a dict with one of them.
Prompt = str | Sequence[int] | dict[str, Any]


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as the engine takes it; text is None if it was given as token ids."""

    text: str | None
    token_ids: list[int]


def as_prompts(prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer) -> list[TokenizedPrompt]:
    """One prompt or several, tokenized; raises UsageError for anything else, naming which."""
    if isinstance(prompts, str | dict) or (_is_ids(prompts) and prompts):
        return [_tokenized(prompts, "the prompt", tokenizer)]
    if not isinstance(prompts, list | tuple):
        raise UsageError(_no_prompt("a prompt", prompts))
    return [_tokenized(item, f"prompt {n}", tokenizer) for n, item in enumerate(prompts)]


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
            f"sampling_params must be SamplingParams or a list of them, not {shortened(params)}"
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
        f"or a list of such lists, not {shortened(messages)}"
    )


def _tokenized(prompt: Any, name: str, tokenizer: Tokenizer) -> TokenizedPrompt:
    given = prompt
    if isinstance(prompt, dict) and prompt.keys() in ({"prompt"}, {"prompt_token_ids"}):
        (prompt,) = prompt.values()
    if isinstance(prompt, str):
        return TokenizedPrompt(prompt, tokenizer.encode(prompt))
    if not _is_ids(prompt):
        raise UsageError(_no_prompt(name, given))
    return TokenizedPrompt(None, [operator.index(token) for token in prompt])


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
