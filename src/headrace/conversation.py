"""From conversations as clients send them to what chat templates take: the server's, `LLM.chat`'s
and the command line's.

Histories come back in many forms: with nulls, hints for other servers, contents in parts. Taken is
what a template is told or what asks for nothing; what would get lost is refused by its name.
Sources: https://platform.openai.com/docs/api-reference/chat; vLLM's chat utilities, for how parts
are joined and calls' arguments parsed; transformers' apply_chat_template, for the rest.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from headrace.checkpoint.chat_template import ChatTemplate, Message, TooMuchTextError
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.checks import shortened
from headrace.errors import UsageError

_ROLES = ("system", "developer", "user", "assistant", "tool")
# Keys of a content's parts that are texts, by the parts' types.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# A template may know any of them; transformers gives it the first two, filled from the first found.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# What says something to a server or a program, but nothing to a model.
_HINTS = frozenset(
    {
        "id", "index", "annotations", "cache_control", "created_at", "logprobs", "metadata",
        "parsed", "parsed_arguments", "provider_specific_fields", "reasoning_details", "status",
        "thinking_blocks", "timestamp",
    }
)  # fmt: skip
# What a template may know, but can't be given without what it stands for.
_NO_TEXT = frozenset({"audio", "function_call", "images", "image", "video", "videos"})
# Characters of the names of fields that a message, or a part of one, may have beside its text.
_NAMES_LEN = 200
# Arguments of transformers' apply_chat_template, which are the caller's or no template variables.
_RESERVED_OPTIONS = frozenset(
    {
        "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
        "continue_final_message", "tokenize", "padding", "truncation", "max_length",
        "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
        "processor_kwargs", "sanitize_control_tokens",
    }
)  # fmt: skip


class ConversationError(UsageError):
    """field: what is at fault, such as messages[3].content; too_long: it is its length."""

    def __init__(self, field: str, what: str, *, too_long: bool = False) -> None:
        super().__init__(field + what)
        self.field = field
        self.too_long = too_long


def render_conversation(
    messages: object,
    tokenizer: Tokenizer,
    max_model_len: int,
    add_generation_prompt: bool = True,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The prompt that the model's chat template makes of messages; blocks, for seconds at most.

    messages: a list of objects with role and content, of JSON values. add_generation_prompt: end
    with the beginning of the answer. options: variables of the template, of JSON values.
    Raises UsageError if there is no template or it refuses them; ConversationError for what is
    wrong with a field, or too long for max_model_len tokens, before anything is rendered.
    """
    template = tokenizer.chat_template
    if template is None:
        raise UsageError(tokenizer.no_template)
    for name in options:
        if name in _RESERVED_OPTIONS:
            raise ConversationError(
                "chat_template_kwargs", f" must not have {name}: it is set otherwise"
            )
    if not isinstance(messages, list | tuple) or not messages:
        raise ConversationError("messages", " must be a list of at least one message")
    given = [_as_dict(f"messages[{number}]", message) for number, message in enumerate(messages)]
    longest = max_model_len * tokenizer.longest_token
    _check_size(given, max_model_len, longest)
    known = {name: value for name, value in options.items() if name in template.words}
    if _is_larger(known, longest + _NAMES_LEN):
        raise ConversationError(
            "chat_template_kwargs",
            f" has more than the {longest} characters that fit into {max_model_len} tokens "
            "(--max-model-len)",
            too_long=True,
        )
    found = [_message(f"messages[{n}]", message, template) for n, message in enumerate(given)]
    render = partial(
        template.render,
        most_characters=longest,
        add_generation_prompt=add_generation_prompt,
        options=options,
    )
    try:
        text, found = _rendered(render, found)
    except TooMuchTextError:
        raise _too_long(f"more than {longest} characters, as rendered, do", max_model_len) from None
    callers = [number for number, message in enumerate(found) if "tool_calls" in message]
    if callers and _shows_no_calls(render, found, text):
        raise ConversationError(
            f"messages[{callers[0]}].tool_calls",
            ": the model's chat template has no calls of tools: leave them out, or take a model "
            "whose template shows them",
        )
    return text


def _rendered(
    render: Callable[[list[Message]], str], chat: list[Message]
) -> tuple[str, list[Message]]:
    """The prompt, and the messages that it was made of: an answer without a content has none, as in
    transformers, or an empty one, as in vLLM, if the template cannot do without."""
    try:
        return render(chat), chat
    except TooMuchTextError:
        raise
    except UsageError:
        filled = [{"content": "", **message} for message in chat]
        if filled == chat:
            raise
        return render(filled), filled


def _shows_no_calls(render: Callable[[list[Message]], str], chat: list[Message], text: str) -> bool:
    """Whether the prompt would be the same without them."""
    bare = [{k: value for k, value in message.items() if k != "tool_calls"} for message in chat]
    try:
        return render(bare) == text
    except UsageError:
        return False


def check_chats(tokenizer: Tokenizer) -> None:
    """Raises UsageError if the model cannot be given chats. The first time, this takes a second."""
    render_conversation([{"role": "user", "content": "?"}], tokenizer, 1000)


def _as_dict(where: str, value: object) -> dict[str, Any]:
    """An object, also as the openai package has it."""
    if callable(dump := getattr(value, "model_dump", None)):
        value = dump()
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConversationError(where, f" must be an object, not {shortened(value)}")
    return value


def _check_size(messages: list[dict[str, Any]], max_model_len: int, longest: int) -> None:
    """Bounds what is looked at afterwards, by what could fit whatever the template is."""
    pieces = 0
    for message in messages:
        lists = [message.get(name) for name in ("content", "tool_calls")]
        pieces += max(1, sum(len(value) for value in lists if isinstance(value, list | tuple)))
    if pieces > max_model_len:
        raise _too_long(f"{pieces} messages and parts of them do", max_model_len)
    # The names of fields are not in the prompt.
    if _is_larger(messages, longest + _NAMES_LEN * pieces):
        raise _too_long(f"more than {longest} characters do", max_model_len)


def _is_larger(values: object, limit: int) -> bool:
    """Whether there are more characters in all texts in it, and other values, than the limit."""
    size = 0
    rest = [values]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            rest += value
        else:
            size += len(value) if isinstance(value, str) else 1
        if size + len(rest) > limit:
            return True
    return False


def _too_long(what: str, max_model_len: int) -> ConversationError:
    return ConversationError(
        "messages",
        f": {what} not fit into the {max_model_len} tokens that a sequence may have "
        "(--max-model-len)",
        too_long=True,
    )


def _message(where: str, given: dict[str, Any], template: ChatTemplate) -> Message:
    """A message as templates know it, its fields in their order. Nulls are left out, as in
    transformers, since many templates would print them."""
    role = given.get("role")
    found: Message = {}
    for name, value in given.items():
        at = f"{where}.{name}"
        if value is None:
            continue
        if name == "role":
            found[name] = _role(at, value, template)
        elif name == "content":
            found[name] = _content(at, value)
        elif name == "refusal":
            # What was answered instead of a content.
            if role == "assistant" and not given.get("content"):
                found["content"] = _text(at, value)
            else:
                _check_meaningless(at, name, _text(at, value))
        elif name == "tool_calls":
            if calls := _tool_calls(at, value, role):
                found[name] = calls
        elif name == "tool_call_id" and role != "tool":
            if _text(at, value):
                raise ConversationError(at, ": only messages of the role tool answer a call")
        elif name in ("name", "tool_call_id", *_REASONING):
            found[name] = _text(at, value)
        elif name in template.words and name not in _HINTS | _NO_TEXT:
            found[name] = value
        else:
            _check_meaningless(at, name, value)
    if "role" not in found:
        raise ConversationError(f"{where}.role", " is missing")
    if role == "assistant":
        there = "content" in given or bool(found.keys() & {"tool_calls", *_REASONING})
    else:
        there = "content" in found
    if not there:
        raise ConversationError(f"{where}.content", " is missing")
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    if reasoning is None:
        return found
    return {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _role(at: str, value: object, template: ChatTemplate) -> str:
    role = _text(at, value)
    # OpenAI's newer word for it, which few templates know.
    if role == "developer" and role not in template.words:
        return "system"
    if role not in _ROLES and role not in template.words:
        raise ConversationError(
            at,
            f" must be one of {', '.join(_ROLES)}, or one that the model's chat template names, "
            f"not {shortened(role)}",
        )
    return role


def _text(at: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConversationError(at, f" must be a text, not {shortened(value)}")
    return value


def _content(at: str, content: object) -> str:
    """Parts are joined by newlines, as in vLLM."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ConversationError(at, f" must be a text or a list of parts, not {shortened(content)}")
    return "\n".join([_part(f"{at}[{number}]", part) for number, part in enumerate(content)])


def _part(at: str, part: object) -> str:
    if isinstance(part, str):
        return part
    fields = _as_dict(at, part)
    kind = fields.get("type")
    key = (
        _TEXT_PARTS.get("text" if kind is None else kind) if isinstance(kind, str | None) else None
    )
    if key is None:
        raise ConversationError(f"{at}.type", f": only text is supported, not {shortened(kind)}")
    if fields.get(key) is None:
        raise ConversationError(f"{at}.{key}", " is missing")
    for name, value in fields.items():
        if name not in ("type", key):
            _check_meaningless(f"{at}.{name}", name, value)
    return _text(f"{at}.{key}", fields[key])


def _tool_calls(at: str, calls: object, role: object) -> list[Any]:
    if not isinstance(calls, list | tuple):
        raise ConversationError(at, f" must be a list, not {shortened(calls)}")
    if calls and role != "assistant":
        raise ConversationError(at, ": only messages of the role assistant call tools")
    return [_tool_call(f"{at}[{number}]", call) for number, call in enumerate(calls)]


def _tool_call(where: str, call: object) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in _as_dict(where, call).items():
        at = f"{where}.{name}"
        if value is None:
            continue
        if name == "type":
            if value != "function":
                raise ConversationError(at, f" must be function, not {shortened(value)}")
            found[name] = value
        elif name == "id":
            found[name] = _text(at, value)
        elif name == "function":
            found[name] = _function(at, _as_dict(at, value))
        else:
            _check_meaningless(at, name, value)
    if "function" not in found:
        raise ConversationError(f"{where}.function", " is missing")
    return found


def _function(where: str, function: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in function.items():
        at = f"{where}.{name}"
        if name == "arguments":
            found[name] = _arguments(at, value)
        elif name == "name" and value is not None:
            found[name] = _text(at, value)
        else:
            _check_meaningless(at, name, value)
    if "name" not in found:
        raise ConversationError(f"{where}.name", " is missing")
    return {"arguments": {}, **found} if "arguments" not in found else found


def _arguments(at: str, value: object) -> dict[str, Any]:
    """Templates want them as an object, OpenAI has them as a text."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError):
            value = None
    elif value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConversationError(at, " must be a JSON object, or one as a text")
    return value


def _check_meaningless(at: str, name: str, value: object) -> None:
    """Raises ConversationError unless what is left out says nothing to the model."""
    if name in _HINTS or value is None or value is False or value in ("", [], {}):
        return
    raise ConversationError(at, ": there is no such field, or it is not supported")
