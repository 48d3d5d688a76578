"""What the API refuses, and what it takes since it asks for nothing."""

from typing import Any

import openai
import pytest
from openai import OpenAI

from headrace import LLM, SamplingParams
from serving.tiny_model import (
    MAX_LENGTH,
    MODEL,
    chat,
    chat_arguments,
    complete,
    completion_arguments,
)

PROMPT = "The mill wheel turns"
USER = [{"role": "user", "content": "Why does it turn?"}]
SEEDED: dict[str, Any] = {"max_tokens": 10, "seed": 7}


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "temperature": 0}, "best_of"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"n": 0}, "n"),
        ({"n": 41}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 301}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": 301}, "prompt_logprobs"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"seed": "one"}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"bad_words": [""]}, "bad_words"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a*"}}, "structured_outputs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"priority": "high"}, "priority"),
        ({"no_such_field": None}, "no_such_field"),
    ],
    ids=str,
)
def test_what_completions_cannot_do_is_refused_with_the_name_of_the_field(
    client: OpenAI, params: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**completion_arguments({"prompt": "a", **params}))
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert param in caught.value.message


def test_a_stream_is_not_ranked(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a", n=1, best_of=2, stream=True)
    assert caught.value.param == "best_of"


TOOL = {"type": "function", "function": {"name": "weather"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "bard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "weather"}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"store": True}, "store"),
        ({"metadata": {"a": "b"}}, "metadata"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 301, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -2, "logprobs": True}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 2**40}, "max_completion_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"max_completion_tokens": MAX_LENGTH}, "max_completion_tokens"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": "x"}, "prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
    ],
    ids=str,
)
def test_what_chats_cannot_do_is_refused_with_the_name_of_the_field(
    client: OpenAI, params: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**chat_arguments({"messages": USER, **params}))
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_conversation_longer_than_the_context_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, [{"role": "user", "content": "a" * MAX_LENGTH}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="a")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    assert caught.value.type == "not_found_error"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [
        ("a" * MAX_LENGTH, 1, "prompt"),
        ("a", MAX_LENGTH, "max_tokens"),
        ([5] * MAX_LENGTH, None, "prompt"),
    ],
    ids=["prompt", "answer", "ids"],
)
def test_what_is_longer_than_the_context_is_refused(
    client: OpenAI, prompt: Any, max_tokens: int | None, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=max_tokens)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


def test_errors_have_the_shape_of_openai(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a", temperature=9)
    assert caught.value.response.json() == {
        "error": {
            "message": "temperature must be from 0 to 2, not 9.0",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": None,
        }
    }


def test_values_that_ask_for_nothing_are_taken_in_completions(client: OpenAI, llm: LLM) -> None:
    nothing: dict[str, Any] = {
        "suffix": "", "best_of": 1, "n": 1, "echo": False, "logprobs": None, "stop": None,
        "logit_bias": {}, "user": "me", "stream": False, "stream_options": None, "top_k": -1,
        "min_p": 0, "length_penalty": 1.0, "use_beam_search": False, "skip_special_tokens": True,
        "spaces_between_special_tokens": True, "response_format": {"type": "text"},
        "stop_token_ids": [],
        "bad_words": [], "min_tokens": 0, "priority": 0, "add_special_tokens": True,
        "repetition_penalty": 1, "return_token_ids": False, "truncate_prompt_tokens": None,
    }  # fmt: skip
    (choice,) = complete(client, PROMPT, {**SEEDED, **nothing}).choices
    (output,) = llm.generate([PROMPT], SamplingParams(**SEEDED))
    assert choice.text == output.outputs[0].text


def test_values_that_ask_for_nothing_are_taken_in_chats(client: OpenAI, llm: LLM) -> None:
    nothing: dict[str, Any] = {
        "tools": [], "tool_choice": "none", "functions": [], "function_call": "none",
        "response_format": {"type": "text"}, "modalities": ["text"], "service_tier": "auto",
        "store": False, "metadata": {}, "reasoning_effort": "none", "user": "me", "n": 1,
        "safety_identifier": "x", "prompt_cache_key": "y", "logprobs": False, "top_logprobs": 0,
        "logit_bias": None, "stop": [], "stream": False, "top_p": 1, "echo": False,
        "documents": None, "chat_template": None, "continue_final_message": False,
    }  # fmt: skip
    (choice,) = chat(client, USER, **SEEDED, **nothing).choices
    (output,) = llm.chat(USER, SamplingParams(**SEEDED))
    assert choice.message.content == output.outputs[0].text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["a"] * 1025),
        ("stop_token_ids", [1] * 1025),
        ("bad_words", ["a"] * 1025),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("bad_words", ["a" * 10_001]),
        ("stop", [f"{n:04}" + "a" * 50 for n in range(200)]),
        ("bad_words", [f"{n:04}" + "a" * 500 for n in range(1000)]),
        # Fewer characters than there may be, but too many tokens.
        ("bad_words", [f"{n:04}" + "é" * 50 for n in range(1000)]),
    ],
    ids=[
        "stop",
        "stop tokens",
        "bad words",
        "biases",
        "a long bad word",
        "stop in all",
        "bad words in all",
        "tokens of bad words in all",
    ],
)
def test_what_everybody_waits_for_is_bounded(client: OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**completion_arguments({"prompt": "a", field: value}))
    assert caught.value.param is not None
    assert caught.value.param.startswith(field)
