"""/v1/chat/completions, /tokenize and /detokenize, compared with the same model offline."""

from typing import Any

import httpx
import pytest
from openai import OpenAI

from headrace import LLM, SamplingParams
from serving.tiny_model import MAX_LENGTH, MODEL, chat

USER = [{"role": "user", "content": "Why does it turn?"}]
SEEDED: dict[str, Any] = {"max_tokens": 10, "seed": 7}


def answers(llm: LLM, rendered: str, **params: Any) -> list[str]:
    """What the model says offline to a prompt as the template makes it."""
    (output,) = llm.generate([rendered], SamplingParams(**params))
    return [completion.text for completion in output.outputs]


def rendered(http: httpx.Client, **body: Any) -> str:
    """A conversation as the model sees it."""
    answer = http.post("/tokenize", json=body).raise_for_status().json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == MAX_LENGTH
    tokens = {"model": MODEL, "tokens": answer["tokens"]}
    answer = http.post("/detokenize", json=tokens).raise_for_status().json()
    return str(answer["prompt"])


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (USER, "<user>Why does it turn?\n<assistant>"),
        (
            [{"role": "system", "content": "Be brief."}, {**USER[0], "name": "Ann"}],
            "<system>Be brief.\n<user Ann>Why does it turn?\n<assistant>",
        ),
        # OpenAI's newer word for it, which templates do not know.
        ([{"role": "developer", "content": "x"}, *USER],
         "<system>x\n<user>Why does it turn?\n<assistant>"),
        (
            [{"role": "user", "content": [part("Öl"), part("?")]}],
            "<user>Öl\n?\n<assistant>",
        ),
        (
            [
                *USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
                {"role": "assistant", "content": [part("It rains.")]},
                *USER,
            ],
            "<user>Why does it turn?\n<assistant>[call_1 weather Köln]\n<tool>rain for call_1\n"
            "<assistant>It rains.\n<user>Why does it turn?\n<assistant>",
        ),
    ],
    ids=["user", "system", "developer", "parts", "tools"],
)  # fmt: skip
def test_conversations_are_answered_as_the_template_renders_them(
    client: OpenAI, http: httpx.Client, llm: LLM, messages: list[Any], text: str
) -> None:
    assert rendered(http, messages=messages) == text
    (choice,) = chat(client, messages, **SEEDED).choices
    assert [choice.message.content] == answers(llm, text, **SEEDED)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")


def test_an_answer_is_that_of_chat_offline(client: OpenAI, llm: LLM) -> None:
    (output,) = llm.chat(USER, SamplingParams(**SEEDED, n=3))
    answer = chat(client, USER, **SEEDED, n=3)
    assert [choice.message.content for choice in answer.choices] == [
        completion.text for completion in output.outputs
    ]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    assert answer.usage.completion_tokens == 30


def test_an_answer_goes_back_as_a_message(client: OpenAI, http: httpx.Client, llm: LLM) -> None:
    message = chat(client, USER, **SEEDED).choices[0].message
    text = f"<user>{USER[0]['content']}\n"
    wanted = f"{text}<assistant>{message.content}\n{text}<assistant>"
    # As the client's object, and as its dictionary with a null for all that is not there.
    for again in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        history: list[Any] = [*USER, again, *USER]
        chat(client, history, max_tokens=1)
        (output,) = llm.chat(history, SamplingParams(max_tokens=1))
        assert output.prompt == wanted
    assert rendered(http, messages=[*USER, message.model_dump(), *USER]) == wanted


def test_offline_chats_become_the_same_prompts(http: httpx.Client, llm: LLM) -> None:
    marked = {**part("x"), "cache_control": {"type": "ephemeral"}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [marked, part("y")]},
        {**USER[0], "name": "Ann", "cache_control": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "content": [part("rain")], "tool_call_id": "call_1"},
    ]
    options: dict[str, Any] = {"chat_template_kwargs": {"mood": "happy"}}
    for begin in (True, False):
        options["add_generation_prompt"] = begin
        (output,) = llm.chat(messages, SamplingParams(max_tokens=1), **options)
        assert output.prompt == rendered(http, messages=messages, **options)
        assert "[call_1 weather Köln]" in output.prompt


def test_a_conversation_has_no_more_messages_than_there_is_room_for(http: httpx.Client) -> None:
    for messages in (USER * (MAX_LENGTH + 1), [{**USER[0], "content": [part("")] * 20_001}]):
        answer = http.post("/v1/chat/completions", json={"messages": messages})
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
        assert "--max-model-len" in error["message"]


def test_templates_are_given_options(client: OpenAI, http: httpx.Client, llm: LLM) -> None:
    options = {"chat_template_kwargs": {"mood": "happy"}}
    text = "<user>Why does it turn?\n<assistant happy>"
    assert rendered(http, messages=USER, **options) == text
    (choice,) = chat(client, USER, **SEEDED, **options).choices
    assert [choice.message.content] == answers(llm, text, **SEEDED)


def test_the_beginning_of_the_answer_can_be_left_out(
    client: OpenAI, http: httpx.Client, llm: LLM
) -> None:
    text = "<user>Why does it turn?\n"
    assert rendered(http, messages=USER, add_generation_prompt=False) == text
    (choice,) = chat(client, USER, **SEEDED, add_generation_prompt=False).choices
    assert [choice.message.content] == answers(llm, text, **SEEDED)


def test_texts_and_tokens_are_turned_into_each_other(http: httpx.Client, llm: LLM) -> None:
    text = "Ünïcödé 東京 <end>"
    body = {"model": MODEL, "prompt": text, "return_token_strs": True}
    answer = http.post("/tokenize", json=body).raise_for_status().json()
    core = llm.tokenizer.core
    assert answer["tokens"] == llm.tokenizer.encode(text)
    assert answer["token_strs"] == [core.id_to_token(token) for token in answer["tokens"]]
    body = {"model": MODEL, "tokens": answer["tokens"]}
    answer = http.post("/detokenize", json=body).raise_for_status().json()
    assert answer == {"prompt": text}


def test_the_newer_name_of_max_tokens_wins(client: OpenAI) -> None:
    for params in ({"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 9}):
        answer = chat(client, USER, **params, ignore_eos=True)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


def test_log_probabilities_are_those_of_offline(client: OpenAI, llm: LLM) -> None:
    (output,) = llm.chat(USER, SamplingParams(**SEEDED, logprobs=3))
    (completion,) = output.outputs
    assert completion.logprobs is not None
    (choice,) = chat(client, USER, **SEEDED, logprobs=True, top_logprobs=3).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    shown = zip(choice.logprobs.content, completion.token_ids, completion.logprobs, strict=True)
    for found, token, entries in shown:
        assert found.token == entries[token].decoded_token
        assert found.logprob == pytest.approx(entries[token].logprob, abs=1e-5)
        best = sorted((e for e in entries.values() if e.rank <= 3), key=lambda entry: entry.rank)
        assert [top.token for top in found.top_logprobs] == [e.decoded_token for e in best]
        for top, entry in zip(found.top_logprobs, best, strict=True):
            assert top.logprob == pytest.approx(entry.logprob, abs=1e-5)
    (choice,) = chat(client, USER, **SEEDED, logprobs=True).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [found.top_logprobs for found in choice.logprobs.content] == [[]] * 10
    assert chat(client, USER, **SEEDED).choices[0].logprobs is None


def test_log_probabilities_of_the_whole_vocabulary_where_they_are_allowed(client: OpenAI) -> None:
    (choice,) = chat(client, USER, max_tokens=1, logprobs=True, top_logprobs=-1).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    (found,) = choice.logprobs.content
    logprobs = [top.logprob for top in found.top_logprobs]
    assert len(logprobs) == 300
    assert logprobs == sorted(logprobs, reverse=True)


def test_the_bytes_of_tokens_add_up_to_the_text(client: OpenAI, llm: LLM) -> None:
    # Tokens are bytes here, so a character takes two of them.
    biased = dict.fromkeys(llm.tokenizer.encode("é"), 100.0)
    (choice,) = chat(
        client, USER, seed=1, max_tokens=20, logit_bias=biased, logprobs=True, top_logprobs=2
    ).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    data = bytes(byte for found in choice.logprobs.content for byte in found.bytes or ())
    assert data.decode(errors="replace") == choice.message.content
    assert "é" in choice.message.content
    (choice,) = chat(client, USER, max_tokens=1, logprobs=True, logit_bias={299: 100.0}).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    # A special token reads as the vocabulary has it.
    assert bytes(choice.logprobs.content[0].bytes or ()) == b"<end>"


def test_tokens_can_be_given_as_their_ids(client: OpenAI, llm: LLM) -> None:
    (output,) = llm.chat(USER, SamplingParams(**SEEDED))
    (choice,) = chat(client, USER, **SEEDED, logprobs=True, return_tokens_as_token_ids=True).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [found.token for found in choice.logprobs.content] == [
        f"token_id:{token}" for token in output.outputs[0].token_ids
    ]


def test_prompt_log_probabilities_are_those_of_the_rendered_prompt(
    client: OpenAI, llm: LLM
) -> None:
    (output,) = llm.chat(USER, SamplingParams(max_tokens=1, prompt_logprobs=1))
    answer = chat(client, USER, max_tokens=1, prompt_logprobs=1)
    assert answer.model_extra is not None
    found = answer.model_extra["prompt_logprobs"]
    assert output.prompt_logprobs is not None
    assert [entry and set(entry) for entry in found] == [
        entry and {str(token) for token in entry} for entry in output.prompt_logprobs
    ]
