"""/v1/completions through the official client, compared with the same model offline."""

import codecs
import math
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import CompletionChoice
from transformers.convert_slow_tokenizer import bytes_to_unicode

from headrace import LLM, SamplingParams
from headrace.engine.outputs import CompletionOutput, Logprobs
from serving.tiny_model import (
    END_TOKEN,
    MAX_LENGTH,
    MODEL,
    OTHER_NAME,
    complete,
    completion_arguments,
)

PROMPT = "The mill wheel turns"
IDS = list(range(60, 80))
SEEDED: dict[str, Any] = {"max_tokens": 12, "seed": 7}
# Tokens that are a character each.
LETTERS = range(65, 75)


def offline(llm: LLM, prompt: Any, params: dict[str, Any]) -> CompletionOutput:
    (output,) = llm.generate([prompt], SamplingParams(**params))
    return output.outputs[0]


@pytest.fixture(scope="module")
def plain(llm: LLM) -> CompletionOutput:
    """What is answered to PROMPT with nothing but SEEDED."""
    return offline(llm, PROMPT, SEEDED)


def check(choice: CompletionChoice, expected: CompletionOutput) -> None:
    """The same text and the same end."""
    assert choice.text == expected.text
    assert choice.finish_reason == expected.finish_reason
    assert extra(choice, "stop_reason") == expected.stop_reason


def extra(answer: Any, name: str) -> Any:
    """A field that OpenAI's types do not have."""
    return answer.model_extra[name]


def test_models_are_listed_and_found_by_each_of_their_names(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, OTHER_NAME]
    found = client.models.retrieve(OTHER_NAME)
    assert (found.id, found.object, extra(found, "max_model_len")) == (
        OTHER_NAME,
        "model",
        MAX_LENGTH,
    )
    assert extra(found, "architecture") == "LlamaForCausalLM"
    assert extra(found, "dtype") in ("float32", "bfloat16")
    assert extra(found, "num_stages") == 2
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_an_answer_has_the_name_that_was_asked_for(client: OpenAI) -> None:
    answer = client.completions.create(model=OTHER_NAME, prompt="a", max_tokens=1, user="me")
    assert (answer.model, answer.object) == (OTHER_NAME, "text_completion")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        (PROMPT, [PROMPT]),
        (IDS, [IDS]),
        ([PROMPT, "Ünïcödé 東京"], [PROMPT, "Ünïcödé 東京"]),
        ([IDS, [1], IDS[:5]], [IDS, [1], IDS[:5]]),
    ],
    ids=["text", "ids", "texts", "lists-of-ids"],
)
def test_prompts_of_every_form_are_completed_in_order(
    client: OpenAI, llm: LLM, prompt: Any, prompts: list[Any]
) -> None:
    answer = complete(client, prompt, SEEDED)
    assert [choice.index for choice in answer.choices] == list(range(len(prompts)))
    outputs = llm.generate(prompts, SamplingParams(**SEEDED))
    for choice, output in zip(answer.choices, outputs, strict=True):
        check(choice, output.outputs[0])
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in outputs)
    assert answer.usage.completion_tokens == 12 * len(prompts)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12 * len(prompts)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0.4},
        {"top_p": 0.3},
        {"top_k": 2},
        {"min_p": 0.6},
        {"repetition_penalty": 5.0, "temperature": 0.3},
        {"presence_penalty": 2.0, "temperature": 0.3},
        {"frequency_penalty": 2.0, "temperature": 0.3},
        {"logit_bias": {5: 100.0}},
        {"seed": 8},
        {"max_tokens": 3},
        {"stop_token_ids": list(range(150))},
    ],
    ids=lambda params: str(next(iter(params))),
)
def test_every_parameter_reaches_the_engine(
    client: OpenAI, llm: LLM, plain: CompletionOutput, params: dict[str, Any]
) -> None:
    params = {**SEEDED, **params}
    expected = offline(llm, PROMPT, params)
    assert expected.token_ids != plain.token_ids
    check(complete(client, PROMPT, params).choices[0], expected)


def test_bad_words_do_not_come_about(client: OpenAI, llm: LLM) -> None:
    bias = dict.fromkeys(LETTERS, 50.0)
    free = complete(client, PROMPT, {**SEEDED, "logit_bias": bias}).choices[0]
    params = {**SEEDED, "logit_bias": bias, "bad_words": [free.text[3], free.text[5:7]]}
    answer = complete(client, PROMPT, params).choices[0]
    check(answer, offline(llm, PROMPT, params))
    assert free.text[3] not in answer.text
    assert free.text[5:7] not in answer.text


def test_an_end_token_ends_an_answer_without_a_stop_reason(client: OpenAI) -> None:
    end = {"logit_bias": {str(END_TOKEN): 100}, "max_tokens": 6, "seed": 1}
    answer = complete(client, PROMPT, end)
    (choice,) = answer.choices
    assert (choice.finish_reason, extra(choice, "stop_reason"), choice.text) == ("stop", None, "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1

    answer = complete(client, PROMPT, {**end, "ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6

    answer = complete(client, PROMPT, {**end, "min_tokens": 4})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_stop_strings_end_an_answer_and_are_named(client: OpenAI, llm: LLM) -> None:
    base = {"logit_bias": dict.fromkeys(LETTERS, 50.0), "max_tokens": 24, "seed": 3}
    text = complete(client, PROMPT, base).choices[0].text
    assert len(text) == 24
    stop = text[7:10]
    for kept, tail in ((False, ""), (True, stop)):
        params = {**base, "stop": ["no such text", stop], "include_stop_str_in_output": kept}
        (choice,) = complete(client, PROMPT, params).choices
        assert choice.text == text[: text.index(stop)] + tail
        assert (choice.finish_reason, extra(choice, "stop_reason")) == ("stop", stop)
    (choice,) = complete(client, PROMPT, {**base, "stop": stop}).choices
    assert choice.text == text[: text.index(stop)]


def test_a_stop_token_is_named_by_its_id(client: OpenAI, plain: CompletionOutput) -> None:
    token = plain.token_ids[4]
    (choice,) = complete(client, PROMPT, {**SEEDED, "stop_token_ids": [token]}).choices
    assert (choice.finish_reason, extra(choice, "stop_reason")) == ("stop", token)


def test_n_answers_are_those_of_offline(client: OpenAI, llm: LLM) -> None:
    answer = complete(client, [PROMPT, IDS], {**SEEDED, "n": 3})
    prompts: list[Any] = [PROMPT, IDS]
    outputs = llm.generate(prompts, SamplingParams(**SEEDED, n=3))
    completions = [completion for output in outputs for completion in output.outputs]
    assert [choice.index for choice in answer.choices] == list(range(6))
    for choice, expected in zip(answer.choices, completions, strict=True):
        check(choice, expected)
    assert len({choice.text for choice in answer.choices}) == 6
    assert answer.usage is not None
    # Each prompt counts once.
    assert answer.usage.prompt_tokens == len(PROMPT) + len(IDS)
    assert answer.usage.completion_tokens == 6 * 12


def test_best_of_gives_those_with_the_highest_mean_log_probability(
    client: OpenAI, llm: LLM
) -> None:
    # Answers of different lengths, so that the mean is not the sum.
    params: dict[str, Any] = {**SEEDED, "stop_token_ids": list(range(10))}
    (output,) = llm.generate([PROMPT], SamplingParams(**params, n=8, logprobs=0))
    assert len({len(completion.token_ids) for completion in output.outputs}) > 1

    def mean(completion: CompletionOutput) -> float:
        assert completion.cumulative_logprob is not None
        return completion.cumulative_logprob / len(completion.token_ids)

    best = sorted(output.outputs, key=mean, reverse=True)[:2]
    answer = complete(client, PROMPT, {**params, "n": 2, "best_of": 8})
    assert [choice.text for choice in answer.choices] == [completion.text for completion in best]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.logprobs for choice in answer.choices] == [None, None]
    assert answer.usage is not None
    # All of them were paid for.
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in output.outputs)


def beginnings(llm: LLM, prompt: list[int], answer: list[int]) -> list[int]:
    """Where each token begins in the text, if it is no part of a character."""
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found, length = [], 0
    for place, token in enumerate([*prompt, *answer]):
        content = str(llm.tokenizer.core.id_to_token(token))
        data = bytes(byte_of[letter] for letter in content)
        if place >= len(prompt) and token == END_TOKEN:
            data = b""
        pending = bool(decoder.getstate()[0])
        # ASCII ends what is unfinished.
        found.append(length + (pending and data[:1] != b"" and data[0] < 0x80))
        length += len(decoder.decode(data))
    return found


def check_logprobs(
    choice: CompletionChoice,
    tokens: list[int],
    entries: list[Logprobs | None],
    count: int,
    offsets: list[int],
) -> None:
    """Of all tokens in order, None for the first of a prompt."""
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    # The client's types have no None in them.
    tops: list[Any] = list(found.top_logprobs or ())
    logprobs: list[Any] = list(found.token_logprobs or ())
    assert len(found.tokens) == len(logprobs) == len(tops) == len(tokens)
    assert found.text_offset is not None
    assert found.text_offset == sorted(found.text_offset)
    for place, (token, entry) in enumerate(zip(tokens, entries, strict=True)):
        if entry is None:
            assert (logprobs[place], tops[place]) == (None, None)
            continue
        assert found.tokens[place] == entry[token].decoded_token
        if "\ufffd" not in found.tokens[place]:
            assert found.text_offset[place] == offsets[place]
        assert logprobs[place] == pytest.approx(entry[token].logprob, abs=1e-5)
        texts = {other.decoded_token for other in entry.values()}
        assert set(tops[place]) == texts
        assert count <= len(entry) <= count + 1
        assert tops[place][found.tokens[place]] >= logprobs[place]


def test_log_probabilities_are_those_of_offline(client: OpenAI, llm: LLM) -> None:
    expected = offline(llm, PROMPT, {**SEEDED, "logprobs": 3})
    (choice,) = complete(client, PROMPT, {**SEEDED, "logprobs": 3}).choices
    check(choice, expected)
    assert expected.logprobs is not None
    ids = expected.token_ids
    check_logprobs(choice, ids, list(expected.logprobs), 3, beginnings(llm, [], ids))
    (choice,) = complete(client, PROMPT, {**SEEDED, "logprobs": 0}).choices
    assert choice.logprobs is not None
    assert choice.logprobs.top_logprobs is not None
    assert all(len(top) == 1 for top in choice.logprobs.top_logprobs)


def test_log_probabilities_of_the_whole_vocabulary_where_they_are_allowed(client: OpenAI) -> None:
    params = {"max_tokens": 2, "logprobs": -1, "return_tokens_as_token_ids": True}
    (choice,) = complete(client, PROMPT, params).choices
    assert choice.logprobs is not None
    for top in choice.logprobs.top_logprobs or ():
        assert top.keys() == {f"token_id:{token}" for token in range(300)}
        assert sum(math.exp(value) for value in top.values()) == pytest.approx(1.0, abs=1e-4)


def test_tokens_can_be_given_as_their_ids(client: OpenAI, llm: LLM) -> None:
    params = {**SEEDED, "logprobs": 2, "return_tokens_as_token_ids": True}
    (choice,) = complete(client, PROMPT, params).choices
    expected = offline(llm, PROMPT, {**SEEDED, "logprobs": 2})
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in expected.token_ids]
    assert expected.logprobs is not None
    assert choice.logprobs.top_logprobs is not None
    assert [set(top) for top in choice.logprobs.top_logprobs] == [
        {f"token_id:{token}" for token in entry} for entry in expected.logprobs
    ]


@pytest.mark.parametrize("prompt", [PROMPT, [100, 101, 299, 102]], ids=["text", "ids"])
@pytest.mark.parametrize("max_tokens", [5, 0])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_echo_begins_with_the_prompt_and_its_log_probabilities(
    client: OpenAI, llm: LLM, prompt: Any, max_tokens: int, stream: bool
) -> None:
    params: dict[str, Any] = {"seed": 7, "max_tokens": max_tokens, "echo": True, "n": 2}
    own = SamplingParams(seed=7, max_tokens=5, n=2, logprobs=2, prompt_logprobs=2)
    (output,) = llm.generate([prompt], own)
    shown = prompt if isinstance(prompt, str) else decode(llm, prompt)
    ids = output.prompt_token_ids
    assert output.prompt_logprobs is not None
    for logprobs in (None, 2):
        asked = {"prompt": prompt, **params, "logprobs": logprobs}
        choices = join(client, asked) if stream else complete(client, prompt, asked).choices
        for choice, completion in zip(choices, output.outputs, strict=True):
            generated = completion.text if max_tokens else ""
            assert choice.text == shown + generated
            assert choice.finish_reason == "length"
            if logprobs is None:
                assert choice.logprobs is None
                continue
            answered = completion.token_ids[:max_tokens]
            entries = output.prompt_logprobs + (completion.logprobs or [])[:max_tokens]
            offsets = beginnings(llm, ids, answered)
            check_logprobs(choice, ids + answered, entries, 2, offsets)


def decode(llm: LLM, tokens: list[int]) -> str:
    return str(llm.tokenizer.core.decode(tokens, skip_special_tokens=False))


def join(client: OpenAI, params: dict[str, Any]) -> list[CompletionChoice]:
    """The choices of a streamed answer, each put together from its pieces."""
    whole: dict[int, CompletionChoice] = {}
    for event in client.completions.create(**completion_arguments(params), stream=True):
        for piece in event.choices:
            known = whole.setdefault(piece.index, piece)
            if known is piece:
                continue
            known.text += piece.text
            known.finish_reason = piece.finish_reason
            if known.logprobs is not None and piece.logprobs is not None:
                for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                    getattr(known.logprobs, name).extend(getattr(piece.logprobs, name))
    return [whole[index] for index in sorted(whole)]


def test_nothing_generated_is_not_counted(client: OpenAI) -> None:
    answer = complete(client, PROMPT, {"echo": True, "max_tokens": 0})
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 0)


def test_prompt_log_probabilities_have_the_shape_of_vllm(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, seed=1, prompt_logprobs=2)
    prompts: list[Any] = [PROMPT, [70]]
    outputs = llm.generate(prompts, params)
    asked = {"max_tokens": 1, "seed": 1, "prompt_logprobs": 2}
    answer = complete(client, [PROMPT, decode(llm, [70])], asked)
    for choice, output in zip(answer.choices, outputs, strict=True):
        first, *others = extra(choice, "prompt_logprobs")
        assert first is None
        assert output.prompt_logprobs is not None
        for found, expected in zip(others, output.prompt_logprobs[1:], strict=True):
            assert expected is not None
            assert found.keys() == {str(token) for token in expected}
            for token, entry in expected.items():
                shown = found[str(token)]
                assert (shown["rank"], shown["decoded_token"]) == (entry.rank, entry.decoded_token)
                assert shown["logprob"] == pytest.approx(entry.logprob, abs=1e-5)


def test_a_prompt_is_found_in_the_cache_the_second_time(client: OpenAI) -> None:
    prompt = [200 + place % 50 for place in range(70)]
    cached = []
    for _ in range(2):
        usage = complete(client, prompt, {"max_tokens": 1}).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    # Whole blocks of 16.
    assert cached == [0, 64]
