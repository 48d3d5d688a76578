"""Programs that speak to OpenAI or vLLM, unmodified: what they send is taken, and what they read
is there."""

import asyncio
import json
import subprocess
from typing import Any, get_type_hints

import httpx
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langchain_openai import OpenAI as CompletingOpenAI
from openai import AsyncOpenAI, OpenAI
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import SecretStr

from headrace import LLM, SamplingParams
from headrace.serving.requests import ChatBody, CompletionBody
from serving.running_server import Server
from serving.tiny_model import MODEL

PROMPT = "The mill wheel turns"
USER: list[Any] = [{"role": "user", "content": "Why does it turn?"}]
PARAMS: dict[str, Any] = {"max_tokens": 10, "seed": 7}


def completed(llm: LLM, prompt: str) -> str:
    (output,) = llm.generate([prompt], SamplingParams(**PARAMS))
    return output.outputs[0].text


def answered(llm: LLM, messages: Any) -> str:
    (output,) = llm.chat(messages, SamplingParams(**PARAMS))
    return output.outputs[0].text


def test_the_bodies_have_every_field_of_the_official_client() -> None:
    """To take it or to refuse it by name."""
    for params, body in (
        (chat_create_params.CompletionCreateParamsStreaming, ChatBody),
        (completion_create_params.CompletionCreateParamsStreaming, CompletionBody),
    ):
        assert set(get_type_hints(params)) <= set(body.__struct_fields__)


def test_the_asynchronous_client_of_openai(server: Server, llm: LLM) -> None:
    async def ask() -> list[str | None]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            whole = await client.completions.create(model=MODEL, prompt=PROMPT, **PARAMS)
            pieces = await client.completions.create(
                model=MODEL, prompt=PROMPT, **PARAMS, stream=True
            )
            streamed = "".join([event.choices[0].text async for event in pieces])
            chat = await client.chat.completions.create(model=MODEL, messages=USER, **PARAMS)
            deltas = await client.chat.completions.create(
                model=MODEL, messages=USER, **PARAMS, stream=True
            )
            said = "".join([event.choices[0].delta.content or "" async for event in deltas])
            return [whole.choices[0].text, streamed, chat.choices[0].message.content, said]

    expected = [completed(llm, PROMPT), answered(llm, USER)]
    assert asyncio.run(ask()) == [expected[0], expected[0], expected[1], expected[1]]


def test_the_stream_helper_of_the_openai_client(client: OpenAI, llm: LLM) -> None:
    # It takes an answer that was cut for an error, so these end by themselves.
    ends: dict[str, Any] = {"stop_token_ids": list(range(256)), "min_tokens": 4}
    pieces = []
    with client.chat.completions.stream(
        model=MODEL,
        messages=USER,
        n=2,
        seed=7,
        logprobs=True,
        stream_options={"include_usage": True},
        extra_body=ends,
    ) as stream:
        for event in stream:
            if event.type == "content.delta":
                pieces.append(event.delta)
        final = stream.get_final_completion()
    (output,) = llm.chat(USER, SamplingParams(seed=7, n=2, max_tokens=None, **ends))
    assert [choice.message.content for choice in final.choices] == [
        completion.text for completion in output.outputs
    ]
    assert sorted("".join(pieces)) == sorted("".join(c.text for c in output.outputs))
    assert final.usage is not None
    assert final.usage.completion_tokens == sum(len(c.token_ids) for c in output.outputs)
    for choice, completion in zip(final.choices, output.outputs, strict=True):
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) == len(completion.token_ids)


def langchain(server: Server, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key=SecretStr("none"),
        max_retries=0,
        seed=7,
        max_tokens=10,  # type: ignore[call-arg]
        **options,
    )


def test_a_chat_model_of_langchain(server: Server, llm: LLM) -> None:
    call = {"name": "weather", "args": {"city": "Rome"}, "id": "call_1", "type": "tool_call"}
    messages = [
        SystemMessage("Be brief."),
        HumanMessage([{"type": "text", "text": "How is the weather?"}]),
        AIMessage("", tool_calls=[call]),
        ToolMessage("rain", tool_call_id="call_1"),
        AIMessage("It rains."),
        HumanMessage("Why?"),
    ]
    prompt = (
        "<system>Be brief.\n<user>How is the weather?\n<assistant>[call_1 weather Rome]\n"
        "<tool>rain for call_1\n<assistant>It rains.\n<user>Why?\n<assistant>"
    )
    model = langchain(server, stream_usage=True)
    expected = completed(llm, prompt)
    whole = model.invoke(messages)
    assert whole.text == expected
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 10
    assert whole.response_metadata["finish_reason"] == "length"
    chunks = list(model.stream(messages))
    assert "".join(chunk.text for chunk in chunks) == expected
    used = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert [usage["output_tokens"] for usage in used] == [10]
    # An answer goes back as it came.
    model.invoke([*messages, whole, HumanMessage("Really?")])

    async def ask() -> list[AIMessage]:
        return [chunk async for chunk in model.astream(messages)]

    assert "".join(chunk.text for chunk in asyncio.run(ask())) == expected


def test_options_of_a_langchain_model(server: Server, llm: LLM) -> None:
    model = langchain(server, temperature=0.5, n=1, logprobs=True, top_logprobs=2,
                      extra_body={"top_k": 3}, presence_penalty=0.1)  # fmt: skip
    answer = model.bind(stop=["no such text"]).invoke("Why?")
    params = SamplingParams(**PARAMS, temperature=0.5, top_k=3, presence_penalty=0.1)
    (output,) = llm.generate(["<user>Why?\n<assistant>"], params)
    assert answer.text == output.outputs[0].text
    assert len(answer.response_metadata["logprobs"]["content"]) == 10


def test_a_completing_model_of_langchain(server: Server, llm: LLM) -> None:
    model = CompletingOpenAI(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key=SecretStr("none"),
        max_retries=0,
        temperature=1.0,
        **PARAMS,
    )
    expected = completed(llm, PROMPT)
    assert model.invoke(PROMPT) == expected
    assert "".join(model.stream(PROMPT)) == expected
    assert model.batch([PROMPT, PROMPT]) == [expected, expected]


def test_the_log_likelihoods_of_lm_evaluation_harness(http: httpx.Client, llm: LLM) -> None:
    """What its local-completions model sends, and how it reads the answer."""
    contexts = [[80, 81, 82, 83], [90, 91]]
    continuations = [[84, 85, 86], [92, 93]]
    prompts = [a + b for a, b in zip(contexts, continuations, strict=True)]
    # A continuation that is what the model would say.
    greedy = SamplingParams(temperature=0, max_tokens=2)
    said = llm.generate([contexts[1]], greedy)[0].outputs[0].token_ids
    prompts[1] = contexts[1] + said
    body = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1,
            "seed": 1234, "echo": True}  # fmt: skip
    found = []
    choices = post(http, body)["choices"]
    for choice, context in zip(sorted(choices, key=lambda c: c["index"]), contexts, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        is_greedy = all(own == max(top.values()) for own, top in zip(logprobs, tops, strict=True))
        found.append((sum(logprobs), is_greedy))
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    for (total, _), output, context in zip(found, outputs, contexts, strict=True):
        assert output.prompt_logprobs is not None
        entries = output.prompt_logprobs[len(context) :]
        tokens = output.prompt_token_ids[len(context) :]
        own = [entry[token] for entry, token in zip(entries, tokens, strict=True) if entry]
        assert total == pytest.approx(sum(entry.logprob for entry in own), abs=1e-4)
    assert [is_greedy for _, is_greedy in found] == [False, True]


def test_the_generations_of_lm_evaluation_harness(http: httpx.Client, llm: LLM) -> None:
    body = {"model": MODEL, "prompt": [[80, 81], [90]], "max_tokens": 8, "temperature": 0,
            "stop": ["\n\n", "</s>"], "seed": 1234}  # fmt: skip
    choices = post(http, body)["choices"]
    greedy = SamplingParams(temperature=0, max_tokens=8, stop=["\n\n", "</s>"])
    prompts: list[Any] = [[80, 81], [90]]
    assert [choice["text"] for choice in choices] == [
        output.outputs[0].text for output in llm.generate(prompts, greedy)
    ]


def post(http: httpx.Client, body: dict[str, Any]) -> Any:
    headers = {"Authorization": "Bearer none"}
    return http.post("/v1/completions", json=body, headers=headers).raise_for_status().json()


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_the_load_of_vllm_bench_serve(http: httpx.Client, chat: bool) -> None:
    """What it sends with either backend, and how it reads the events."""
    content: dict[str, Any]
    if chat:
        path = "/v1/chat/completions"
        parts = [{"type": "text", "text": PROMPT}]
        content = {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 6}
    else:
        path = "/v1/completions"
        content = {"prompt": PROMPT, "repetition_penalty": 1.0, "max_tokens": 6, "logprobs": None}
    body = {
        "model": MODEL,
        **content,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    tokens = pieces = 0
    with http.stream("POST", path, json=body, headers={"x-request-id": "bench-1"}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data in ("", "[DONE]"):
                continue
            event = json.loads(data)
            if choices := event.get("choices"):
                pieces += 1
                if chat:
                    choices[0]["delta"].get("content")
                else:
                    choices[0].get("text")
            elif usage := event.get("usage"):
                tokens = usage["completion_tokens"]
                assert usage["prompt_tokens"] > 0
    assert tokens == 6
    # Some tokens may come together; the role of a chat comes by itself.
    assert 1 + chat <= pieces <= 6 + chat


def test_curl(server: Server, llm: LLM) -> None:
    body = json.dumps({"model": MODEL, "messages": USER, **PARAMS})
    answer = json.loads(curl(f"{server.url}/v1/chat/completions", "--json", body))
    assert answer["choices"][0]["message"]["content"] == answered(llm, USER)
    models = json.loads(curl(f"{server.url}/v1/models"))
    assert models["data"][0]["id"] == MODEL
    # Without a content type curl calls a body a form.
    refused = json.loads(curl(f"{server.url}/v1/chat/completions", "-d", body))
    assert "Content-Type: application/json" in refused["error"]["message"]


def curl(*arguments: str) -> str:
    done = subprocess.run(["curl", "-sS", *arguments], capture_output=True, timeout=60, check=True)
    return done.stdout.decode()
