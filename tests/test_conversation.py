"""Messages as clients send them become what chat templates take, and nothing gets lost unsaid."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage
from tokenizers import Tokenizer as Core
from tokenizers import models
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.checkpoint.chat_template import ChatTemplate
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.conversation import ConversationError, render_conversation
from headrace.errors import UsageError

# Shows every message as it is given it.
SHOWS_ALL = (
    "{% for m in messages %}{{ m | tojson }}\n"
    "{% if m.tool_calls or m.mood or m.role == 'critic' %}{% endif %}{% endfor %}"
)
USER: dict[str, Any] = {"role": "user", "content": "hi"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "yo"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}


def tokenizer(template: str) -> Tokenizer:
    core = Core(models.WordLevel({"x" * 20: 0}, unk_token="x" * 20))
    return Tokenizer(core, ChatTemplate(template, {}))


def given_to_templates(*messages: Any, max_model_len: int = 1000) -> list[Any]:
    text = render_conversation(list(messages), tokenizer(SHOWS_ALL), max_model_len)
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("extra", [{}, {"tool_calls": None}, {"reasoning_content": "hm"}], ids=str)
def test_an_answer_without_a_content_has_an_empty_one_where_the_template_needs_it(
    extra: dict[str, Any],
) -> None:
    chat = [USER, {"role": "assistant", "content": None, **extra}]
    adds = tokenizer("{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}")
    assert render_conversation(chat, adds, 1000) == "user:hi;assistant:;"
    looks = tokenizer("{% for m in messages %}{{ m.content is defined }} {% endfor %}")
    assert render_conversation(chat, looks, 1000) == "True False "


ASKS_FOR_NOTHING: dict[str, dict[str, Any]] = {
    "nulls": {"reasoning_content": None, "reasoning": None, "tool_calls": None, "audio": None,
              "tool_call_id": None, "function_call": None, "refusal": None, "name": None,
              "cache_control": None, "annotations": None, "whatever": None},
    "empty": {"tool_calls": [], "annotations": [], "images": [], "whatever": "", "prefix": False},
    "hints": {"cache_control": {"type": "ephemeral"}, "id": "msg_1", "created_at": 5,
              "annotations": [{"type": "url_citation"}], "provider_specific_fields": {"a": 1}},
}  # fmt: skip


@pytest.mark.parametrize("extra", ASKS_FOR_NOTHING.values(), ids=ASKS_FOR_NOTHING)
@pytest.mark.parametrize("message", [USER, ANSWER, {**USER, "role": "system"}], ids=str)
def test_fields_that_ask_for_nothing_are_taken(
    message: dict[str, Any], extra: dict[str, Any]
) -> None:
    assert given_to_templates({**message, **extra}) == [message]


def test_answers_come_back_as_the_openai_package_has_them() -> None:
    message = ChatCompletionMessage.model_validate({**ANSWER, "reasoning_content": "hm"})
    calling = ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": None, "tool_calls": [CALL]}
    )
    result = {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "ok"}]}
    function = {"name": "f", "arguments": {"x": "é"}}
    wanted = [
        {**ANSWER, "thinking": "hm", "reasoning_content": "hm"},
        {"role": "assistant", "tool_calls": [{**CALL, "function": function}]},
        {**result, "content": "ok"},
    ]
    assert given_to_templates(message, calling, result) == wanted
    assert given_to_templates(message.model_dump(), calling.model_dump(), result) == wanted
    without = [each.model_dump(exclude_none=True) for each in (message, calling)]
    assert given_to_templates(*without, result) == wanted


def test_answers_in_parts_and_refusals_are_texts() -> None:
    parts = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "annotations": []},
        {"type": "refusal", "refusal": "b"},
        {"type": "output_text", "text": "c"},
        {"text": "d"},
        "e",
    ]
    assert given_to_templates({**ANSWER, "content": parts})[0]["content"] == "a\nb\nc\nd\ne"
    refusal = {"role": "assistant", "content": None, "refusal": "no"}
    assert given_to_templates(refusal) == [{"role": "assistant", "content": "no"}]


def test_what_the_template_knows_it_is_given() -> None:
    assert given_to_templates({**USER, "mood": {"a": 1}}) == [{**USER, "mood": {"a": 1}}]
    assert given_to_templates({**USER, "role": "critic"}) == [{**USER, "role": "critic"}]
    assert given_to_templates({**USER, "role": "developer"}) == [{**USER, "role": "system"}]
    for name in ("reasoning", "thinking", "reasoning_content"):
        (found,) = given_to_templates({**ANSWER, name: "hm"})
        assert found["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("hi", "messages[0]"),
        ({"content": "hi"}, "messages[0].role"),
        ({**USER, "role": "king"}, "messages[0].role"),
        ({**USER, "role": 5}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": []}, "messages[0].content"),
        ({**USER, "content": {"text": "hi"}}, "messages[0].content"),
        ({**USER, "content": [5]}, "messages[0].content[0]"),
        ({**USER, "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({**USER, "content": ["a", {"type": "input_audio"}]}, "messages[0].content[1].type"),
        ({**USER, "content": [{"text": "a", "b": 1}]}, "messages[0].content[0].b"),
        ({**USER, "name": 5}, "messages[0].name"),
        ({**USER, "prefix": True}, "messages[0].prefix"),
        ({**USER, "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({**USER, "tool_call_id": "a"}, "messages[0].tool_call_id"),
        ({**ANSWER, "audio": {"id": "a"}}, "messages[0].audio"),
        ({**ANSWER, "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({**ANSWER, "refusal": "no"}, "messages[0].refusal"),
        ({**ANSWER, "tool_calls": {}}, "messages[0].tool_calls"),
        ({**ANSWER, "tool_calls": [{**CALL, "type": "custom"}]}, "messages[0].tool_calls[0].type"),
        ({**ANSWER, "tool_calls": [{"id": "a"}]}, "messages[0].tool_calls[0].function"),
        (
            {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {**ANSWER, "tool_calls": [{"function": {"arguments": "{}"}}]},
            "messages[0].tool_calls[0].function.name",
        ),
    ],
    ids=str,
)
def test_what_would_get_lost_is_refused_by_its_name(message: Any, field: str) -> None:
    with pytest.raises(ConversationError) as caught:
        given_to_templates(message)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


def test_calls_of_tools_are_refused_where_the_template_leaves_them_out() -> None:
    for template in (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        # It looks for a null, which transformers leaves out too.
        "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls }}{% endif %}"
        "{% endfor %}",
    ):
        with pytest.raises(ConversationError, match="no calls of tools") as caught:
            render_conversation(
                [USER, {**ANSWER, "content": None, "tool_calls": [CALL]}], tokenizer(template), 1000
            )
        assert caught.value.field == "messages[1].tool_calls"


def test_a_conversation_has_no_more_messages_and_parts_than_tokens() -> None:
    """Known before anything is rendered: this template would say something else."""
    shy = tokenizer("{{ raise_exception('rendered') }}")
    for messages in (
        [USER] * 11,
        [{**USER, "content": ["a"] * 11}],
        [USER] * 5 + [{**USER, "content": ["a"] * 6}],
        [{**ANSWER, "tool_calls": [CALL] * 11}],
        [{**USER, "content": "a" * 1000}],
        [{**USER, "metadata": ["a"] * 1000}],
        [{**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": "[" * 1000}}]}],
    ):
        with pytest.raises(ConversationError, match="10 tokens that a sequence may") as caught:
            render_conversation(messages, shy, 10)
        assert (caught.value.field, caught.value.too_long) == ("messages", True)
    with pytest.raises(UsageError, match="rendered"):
        render_conversation([USER] * 10, shy, 10)
    with pytest.raises(ConversationError, match="200 characters, as rendered") as caught:
        render_conversation([USER], tokenizer("{% for n in range(99) %}abc{% endfor %}"), 10)
    assert caught.value.too_long


def test_options_that_no_prompt_has_room_for_are_refused() -> None:
    shy = tokenizer("{{ mood or '' }}")
    assert render_conversation([USER], shy, 10, options={"unused": ["x" * 1000]}) == ""
    for mood in ("x" * 1000, [1] * 1000, {"x": ["x"] * 1000}):
        with pytest.raises(ConversationError, match="200 characters that fit") as caught:
            render_conversation([USER], shy, 10, options={"mood": mood})
        assert (caught.value.field, caught.value.too_long) == ("chat_template_kwargs", True)


def test_options_cannot_take_the_place_of_the_chat() -> None:
    for name in ("messages", "tools", "add_generation_prompt", "chat_template"):
        with pytest.raises(ConversationError) as caught:
            render_conversation([USER], tokenizer(SHOWS_ALL), 1000, options={name: None})
        assert caught.value.field == "chat_template_kwargs"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def messages_both_ways(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A message as transformers takes it, and as some client sends it."""
    role = draw(st.sampled_from(["system", "user", "assistant", "tool"]))
    parts = draw(st.lists(TEXTS, min_size=1, max_size=3))
    plain: dict[str, Any] = {"role": role, "content": "\n".join(parts)}
    sent: dict[str, Any] = {"role": role, "content": plain["content"]}
    if draw(st.booleans()):
        sent["content"] = [{"type": "text", "text": part, "id": None} for part in parts]
    if role == "tool":
        plain["tool_call_id"] = sent["tool_call_id"] = draw(TEXTS)
    if role == "assistant" and draw(st.booleans()):
        function = {"name": "f", "arguments": draw(st.dictionaries(TEXTS, VALUES, max_size=3))}
        call = {"id": "a", "type": "function"}
        plain["tool_calls"] = [{**call, "function": function}]
        arguments = json.dumps(function["arguments"], ensure_ascii=draw(st.booleans()))
        sent["tool_calls"] = [{**call, "function": {**function, "arguments": arguments}}]
    if role == "assistant" and draw(st.booleans()):
        name = draw(st.sampled_from(["reasoning_content", "reasoning", "thinking"]))
        plain[name] = sent[name] = draw(TEXTS)
    nothing = draw(st.sampled_from(list(ASKS_FOR_NOTHING.values())))
    return plain, {**sent, **{name: nothing[name] for name in nothing if name not in sent}}


@given(st.lists(messages_both_ways(), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_what_clients_send_renders_as_transformers_renders_what_they_mean(chat: Any) -> None:
    plain, sent = [each[0] for each in chat], [each[1] for each in chat]
    expected = render_jinja_template([plain], chat_template=SHOWS_ALL)[0][0]
    assert render_conversation(sent, tokenizer(SHOWS_ALL), 1000) == expected
