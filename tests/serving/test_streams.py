"""Streams through the official client: their events, and that they add up to the whole answer."""

import asyncio
import json
import subprocess
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from headrace import LLM, SamplingParams
from serving.running_server import Server
from serving.tiny_model import MODEL, chat_arguments, completion_arguments

PROMPT = "The mill wheel turns"
USER = [{"role": "user", "content": "Why does it turn?"}]
# Tokens are bytes: these are a character each, and those two for a character.
LETTERS: dict[int, float] = dict.fromkeys(range(65, 75), 50.0)
WITH_USAGE = {"include_usage": True}


@dataclass
class Joined:
    """A choice as its pieces add up. ends: finish and stop reasons of all pieces that have one."""

    text: str = ""
    ends: list[tuple[str, Any]] = field(default_factory=list)

    def add(self, text: str | None, reason: str | None, stop_reason: Any) -> None:
        assert not self.ends, "a piece came after the last"
        self.text += text or ""
        if reason is not None:
            self.ends.append((reason, stop_reason))


def add_completion(joined: dict[int, Joined], event: Any) -> None:
    for choice in event.choices:
        choice_joined = joined.setdefault(choice.index, Joined())
        choice_joined.add(choice.text, choice.finish_reason, choice.stop_reason)


def add_chat(joined: dict[int, Joined], event: Any) -> None:
    for choice in event.choices:
        # The role comes first, and once.
        assert (choice.delta.role == "assistant") == (choice.index not in joined)
        choice_joined = joined.setdefault(choice.index, Joined())
        stop_reason = (choice.model_extra or {}).get("stop_reason")
        choice_joined.add(choice.delta.content, choice.finish_reason, stop_reason)


def in_order(joined: dict[int, Joined]) -> list[tuple[str, list[tuple[str, Any]]]]:
    return [(joined[index].text, joined[index].ends) for index in sorted(joined)]


CASES: dict[str, dict[str, Any]] = {
    "one": {"max_tokens": 12},
    "several": {"max_tokens": 8, "n": 3},
    "characters of several tokens": {"max_tokens": 24, "logit_bias": {}},
    "stop string across tokens": {"max_tokens": 24, "logit_bias": LETTERS, "stop": ""},
    "stop token": {"max_tokens": 12, "stop_token_ids": list(range(60, 90))},
    "greedy": {"max_tokens": 8, "temperature": 0},
}


@pytest.mark.parametrize("name", CASES)
def test_the_pieces_of_a_stream_are_the_whole_answer(client: OpenAI, llm: LLM, name: str) -> None:
    params = {**CASES[name], "seed": 11}
    if name.startswith("characters"):
        params["logit_bias"] = dict.fromkeys(llm.tokenizer.encode("é"), 100.0)
    for kind in ("completion", "chat"):
        if name.startswith("stop string"):
            params.pop("stop", None)
            free = whole(client, kind, params)[0][0]
            params["stop"] = [free[5:8]]
        expected = whole(client, kind, params)
        joined: dict[int, Joined] = {}
        if kind == "chat":
            chat_fields = chat_arguments({"messages": USER, **params})
            for event in client.chat.completions.create(**chat_fields, stream=True):
                add_chat(joined, event)
        else:
            fields = completion_arguments({"prompt": [PROMPT, "Water"], **params})
            for event in client.completions.create(**fields, stream=True):
                add_completion(joined, event)
        assert in_order(joined) == expected
        if name.startswith("characters"):
            assert "é" in expected[0][0]
        if name.startswith("stop string"):
            assert expected[0] == (free[: free.index(free[5:8])], [("stop", free[5:8])])


def whole(
    client: OpenAI, kind: str, params: dict[str, Any]
) -> list[tuple[str, list[tuple[str, Any]]]]:
    """The choices of an answer that is not streamed."""
    answer: Any
    if kind == "chat":
        answer = client.chat.completions.create(**chat_arguments({"messages": USER, **params}))
        texts = [choice.message.content for choice in answer.choices]
    else:
        fields = completion_arguments({"prompt": [PROMPT, "Water"], **params})
        answer = client.completions.create(**fields)
        texts = [choice.text for choice in answer.choices]
    ends = [[(choice.finish_reason, choice.stop_reason)] for choice in answer.choices]
    return list(zip(texts, ends, strict=True))


def test_log_probabilities_come_with_their_pieces(client: OpenAI) -> None:
    params = {"max_tokens": 10, "seed": 3, "logprobs": True, "top_logprobs": 2}
    fields = chat_arguments({"messages": USER, **params})
    expected: Any = client.chat.completions.create(**fields)
    content = []
    for event in client.chat.completions.create(**fields, stream=True):
        for choice in event.choices:
            if choice.logprobs is not None:
                content += choice.logprobs.content
    assert [entry.model_dump() for entry in content] == [
        entry.model_dump() for entry in expected.choices[0].logprobs.content
    ]


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_usage_comes_last_and_only_if_it_is_asked_for(client: OpenAI, kind: str) -> None:
    prompt = [[100 + place % 60 for place in range(40)], [7]]
    create: Any
    if kind == "chat":
        create, fields = client.chat.completions.create, chat_arguments({"messages": USER})
    else:
        create, fields = client.completions.create, completion_arguments({"prompt": prompt})
    fields |= {"max_tokens": 5, "n": 2, "seed": 1, "stream": True}
    # A null is not the same as a field that is not there.
    for event in create(**fields):
        assert "usage" not in event.model_fields_set
    *others, last = create(**fields, stream_options=WITH_USAGE)
    for event in others:
        assert event.choices
        assert "usage" in event.model_fields_set
        assert event.usage is None
    assert last.choices == []
    usage = last.usage
    expected: Any = create(**{**fields, "stream": False}).usage
    assert usage.prompt_tokens == expected.prompt_tokens
    assert usage.completion_tokens == (10 if kind == "chat" else 20)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    # The first stream left its whole blocks of 16 in the cache.
    assert usage.prompt_tokens_details.cached_tokens == 32


def test_all_events_of_a_stream_have_one_id(client: OpenAI) -> None:
    events = list(client.completions.create(model=MODEL, prompt="a", max_tokens=3, stream=True))
    assert len({(event.id, event.created, event.model, event.object) for event in events}) == 1
    assert events[0].object == "text_completion"


def test_the_prompt_log_probabilities_of_a_stream_are_those_of_the_whole(client: OpenAI) -> None:
    extra = {"prompt_logprobs": 1}
    fields: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "seed": 1}
    expected: Any = client.completions.create(**fields, extra_body=extra)
    first, *others = client.completions.create(**fields, extra_body=extra, stream=True)
    shown = first.choices[0].model_extra or {}
    assert shown["prompt_logprobs"] == expected.choices[0].prompt_logprobs
    assert all("prompt_logprobs" not in (e.choices[0].model_extra or {}) for e in others)


def test_a_stream_is_server_sent_events_to_curl(server: Server) -> None:
    body = json.dumps({"model": MODEL, "messages": USER, "max_tokens": 4, "stream": True})
    done = subprocess.run(
        [
            *("curl", "-sSN", "-D", "-"),
            *(f"{server.url}/v1/chat/completions", "--json", body),
        ],
        capture_output=True,
        timeout=60,
        check=True,
    )
    header, _, text = done.stdout.decode().partition("\r\n\r\n")
    status, *lines = header.lower().split("\r\n")
    assert status.startswith("http/1.1 200")
    assert any(line.startswith("content-type: text/event-stream") for line in lines)
    assert "cache-control: no-cache" in lines
    *events, done_event, end = text.split("\n\n")
    assert (done_event, end) == ("data: [DONE]", "")
    for event in events:
        assert event.startswith("data: ")
        assert json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk"


def test_twenty_streams_at_once_are_each_answered_as_offline(server: Server, llm: LLM) -> None:
    """More than run at the same time, so some wait."""
    variants: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 20, "repetition_penalty": 1.3},
        {"logit_bias": LETTERS, "presence_penalty": 1.0},
        {"min_p": 0.1, "stop_token_ids": list(range(40)), "min_tokens": 4},
    ]
    cases: list[tuple[str, dict[str, Any]]] = [
        (f"{'A long common beginning. ' * (number % 3)}Number {number}",
         {**variants[number % 5], "seed": number, "max_tokens": 6 + number})
        for number in range(20)
    ]  # fmt: skip

    async def ask(client: AsyncOpenAI, number: int) -> tuple[str, list[tuple[str, Any]]]:
        prompt, params = cases[number]
        joined: dict[int, Joined] = {}
        if number % 2:
            messages = [{"role": "user", "content": prompt}]
            chat_fields = chat_arguments({"messages": messages, **params})
            chat_events = await client.chat.completions.create(**chat_fields, stream=True)
            async for chat_event in chat_events:
                add_chat(joined, chat_event)
        else:
            fields = completion_arguments({"prompt": prompt, **params})
            events = await client.completions.create(**fields, stream=True)
            async for event in events:
                add_completion(joined, event)
        (answer,) = in_order(joined)
        return answer

    async def ask_all() -> list[tuple[str, list[tuple[str, Any]]]]:
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(20)))

    answers = asyncio.run(ask_all())
    prompts: list[Any] = [
        f"<user>{prompt}\n<assistant>" if number % 2 else prompt
        for number, (prompt, _) in enumerate(cases)
    ]
    outputs = llm.generate(prompts, [SamplingParams(**params) for _, params in cases])
    for answer, output in zip(answers, outputs, strict=True):
        (completion,) = output.outputs
        assert answer == (completion.text, [(completion.finish_reason, completion.stop_reason)])
