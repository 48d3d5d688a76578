"""The bodies that clients send: OpenAI's fields for text, and vLLM's extras.

Fields that stand for something Headrace does not do are here too, since clients send them with
values that ask for nothing; UNSUPPORTED says which values those are.
Sources: https://platform.openai.com/docs/api-reference, https://docs.vllm.ai (OpenAI-compatible
server).
"""

from typing import Annotated, Any, ClassVar

import msgspec

# The usual values of fields that are for other kinds of models, or other kinds of servers.
_NOTHING: tuple[Any, ...] = (None,)
_NO_LIST: tuple[Any, ...] = (None, [])
_NO: tuple[Any, ...] = (None, False)
_YES: tuple[Any, ...] = (None, True)

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
# SamplingParams checks these, and says what is wrong more clearly: here they are for the document.
_Penalty = Annotated[float, msgspec.Meta(extra_json_schema={"minimum": -2, "maximum": 2})]
_Temperature = Annotated[float, msgspec.Meta(extra_json_schema={"minimum": 0, "maximum": 2})]
_TopP = Annotated[float, msgspec.Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})]
_MinP = Annotated[float, msgspec.Meta(extra_json_schema={"minimum": 0, "maximum": 1})]
_Factor = Annotated[float, msgspec.Meta(extra_json_schema={"exclusiveMinimum": 0})]
_TokenId = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0})]
_OrMinusOne = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": -1})]
# Every token that anybody is sent is searched for these, and every step holds the others back.
# And every stage is sent what goes into logits.
_Text = Annotated[str, msgspec.Meta(max_length=10_000)]
_Texts = Annotated[list[_Text], msgspec.Meta(max_length=1024)]
_TokenIds = Annotated[list[_TokenId], msgspec.Meta(max_length=1024)]
_Biases = Annotated[dict[int, float], msgspec.Meta(max_length=1024)]
_Salt = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What all bodies have in common. UNSUPPORTED: fields, and the values that ask for nothing."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """include_usage: count tokens in a last event, without choices."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body, kw_only=True):
    """What completions and chats have in common, named as in SamplingParams where it is the same.

    Nulls stand for the defaults.
    """

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_beam_search": _NO,
        "length_penalty": (None, 1),
        "spaces_between_special_tokens": _YES,
        "truncate_prompt_tokens": _NOTHING,
        "allowed_token_ids": _NOTHING,
        "logits_processors": _NOTHING,
        "structured_outputs": _NOTHING,
        "return_token_ids": _NO,
        "request_id": _NOTHING,
        "vllm_xargs": _NOTHING,
        "kv_transfer_params": _NOTHING,
    }

    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    logit_bias: _Biases | None = None
    n: _Positive | None = None
    seed: int | None = None
    stop: _Text | _Texts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: _Temperature | None = None
    top_p: _TopP | None = None
    user: str | None = None

    top_k: _OrMinusOne | None = None
    min_p: _MinP | None = None
    repetition_penalty: _Factor | None = None
    min_tokens: _Count | None = None
    stop_token_ids: _TokenIds | None = None
    bad_words: _Texts | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: _OrMinusOne | None = None
    priority: _Priority | None = None
    cache_salt: _Salt | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None

    use_beam_search: bool | None = None
    length_penalty: float | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    logits_processors: Any = None
    structured_outputs: Any = None
    return_token_ids: bool | None = None
    request_id: str | None = None
    vllm_xargs: Any = None
    kv_transfer_params: Any = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions. prompt: a text, token ids, or a list of either."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationBody.UNSUPPORTED,
        "suffix": (None, ""),
        "response_format": (None, {"type": "text"}),
    }

    prompt: str | list[str | _TokenId | list[_TokenId]]
    best_of: _Positive | None = None
    echo: bool | None = None
    logprobs: _OrMinusOne | None = None
    max_tokens: _Count | None = 16

    suffix: str | None = None
    response_format: Any = None


# What headrace.conversation takes, as far as a schema can say it.
_TEXT = {"type": ["string", "null"]}
_OBJECTS = {"type": ["array", "null"], "items": {"type": "object"}}
_PARTS = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "object"}]}}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "description": "system, developer, user, assistant or tool"},
        "content": {"anyOf": [_TEXT, _PARTS]},
        "name": _TEXT,
        "reasoning_content": _TEXT,
        "refusal": _TEXT,
        "tool_call_id": _TEXT,
        "tool_calls": _OBJECTS,
    },
}
Messages = Annotated[
    list[dict[str, Any]], msgspec.Meta(min_length=1, extra_json_schema={"items": _MESSAGE})
]


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationBody.UNSUPPORTED,
        "tools": _NO_LIST,
        "tool_choice": (None, "none"),
        "parallel_tool_calls": _NOTHING,
        "functions": _NO_LIST,
        "function_call": (None, "none"),
        "response_format": (None, {"type": "text"}),
        "modalities": (None, ["text"]),
        "audio": _NOTHING,
        "prediction": _NOTHING,
        "web_search_options": _NOTHING,
        "reasoning_effort": (None, "none"),
        "verbosity": _NOTHING,
        "service_tier": (None, "auto", "default"),
        "store": _NO,
        "metadata": (None, {}),
        "echo": _NO,
        "continue_final_message": _NO,
        "chat_template": _NOTHING,
        "documents": _NO_LIST,
        "moderation": _NOTHING,
        "prompt_cache_options": _NOTHING,
        "prompt_cache_retention": (None, "in_memory"),
    }

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: _OrMinusOne | None = None
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    metadata: Any = None
    echo: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    documents: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None


class TokenizeBody(Body, kw_only=True):
    """POST /tokenize: either a prompt or messages, as the API would take them.

    return_token_strs: also how the vocabulary writes each token.
    """

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    """POST /detokenize: the text of tokens, special ones included."""

    tokens: list[_TokenId]
