"""What sampling parameters do from end to end, with transformers' logits as the oracle."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine.outputs import Logprobs
from headrace.errors import UsageError
from tiny_checkpoints import write_tiny_llama

PROMPT = list(range(40, 85))
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    # Prompts go in chunks of 16, blocks are smaller than that.
    with LLM(
        str(checkpoint),
        pipeline_parallel_size=2,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        block_size=8,
        max_logprobs=40,
        scheduling_policy="priority",
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def check_logprobs(entry: Logprobs, logits: torch.Tensor, token: int, count: int) -> None:
    """One position's report is transformers' own distribution."""
    expected = torch.log_softmax(logits, -1)
    best = expected.topk(count).indices.tolist()
    assert set(entry) == {token, *best}
    for number, report in entry.items():
        assert report.logprob == pytest.approx(float(expected[number]), abs=1e-4)
        assert report.rank == int((expected > expected[number]).sum()) + 1


def test_logprobs_of_outputs_and_prompt_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    params = SamplingParams(**{**GREEDY, "temperature": 1.0}, seed=5, logprobs=3, prompt_logprobs=2)
    answer = llm.generate([PROMPT], params)[0]
    (completion,) = answer.outputs
    tokens = completion.token_ids
    with torch.inference_mode():
        logits = reference(torch.tensor([PROMPT + tokens])).logits[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(tokens) == 12
    for place, (entry, token) in enumerate(zip(completion.logprobs, tokens, strict=True)):
        check_logprobs(entry, logits[len(PROMPT) + place - 1], token, 3)
    assert completion.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(completion.logprobs, tokens, strict=True))
    )
    assert answer.prompt_logprobs is not None
    first, *rest = answer.prompt_logprobs
    assert first is None
    assert len(rest) == len(PROMPT) - 1
    for place, report in enumerate(rest):
        assert report is not None
        check_logprobs(report, logits[place], PROMPT[place + 1], 2)
    assert rest[0] is not None
    assert rest[0][PROMPT[1]].decoded_token == llm.tokenizer.decode([PROMPT[1]])


def test_logprobs_of_the_whole_vocabulary_where_they_are_allowed(checkpoint: Path) -> None:
    with LLM(str(checkpoint), max_logprobs=-1) as llm:
        params = SamplingParams(**{**GREEDY, "max_tokens": 1}, logprobs=-1)
        answer = llm.generate([PROMPT], params)[0]
    assert answer.outputs[0].logprobs is not None
    assert len(answer.outputs[0].logprobs[0]) == 300


def test_tokens_that_nothing_is_asked_of_have_no_logprobs(llm: LLM) -> None:
    answer = llm.generate([PROMPT], SamplingParams(**GREEDY))[0]
    assert answer.outputs[0].logprobs is None
    assert answer.outputs[0].cumulative_logprob is None
    assert answer.prompt_logprobs is None


def test_n_completions_are_those_of_consecutive_seeds(llm: LLM) -> None:
    together = llm.generate([PROMPT], SamplingParams(n=3, seed=7, max_tokens=12))[0]
    alone = [
        llm.generate([PROMPT], SamplingParams(seed=7 + index, max_tokens=12))[0].outputs[0]
        for index in range(3)
    ]
    assert [c.index for c in together.outputs] == [0, 1, 2]
    assert [c.token_ids for c in together.outputs] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in together.outputs}) == 3


def test_a_prefix_hit_is_reported_and_changes_nothing(llm: LLM) -> None:
    prompt = list(range(100, 150))
    first, second = (llm.generate([prompt], SamplingParams(**GREEDY))[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 48
    longer = llm.generate([prompt + first.outputs[0].token_ids + [9]], SamplingParams(**GREEDY))[0]
    # Outputs are shared too, once accepted: 50 and 12 tokens fill seven blocks of eight.
    assert longer.num_cached_tokens == 56
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_prompt_logprobs_are_complete_although_the_prefix_is_cached(llm: LLM) -> None:
    llm.generate([PROMPT], SamplingParams(**GREEDY))
    answer = llm.generate([PROMPT], SamplingParams(**GREEDY, prompt_logprobs=0))[0]
    assert answer.num_cached_tokens == 0
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == len(PROMPT)


def test_times_are_in_order(llm: LLM) -> None:
    answer = llm.generate([PROMPT], SamplingParams(**GREEDY))[0]
    times = answer.outputs[0].token_times_s
    metrics = answer.metrics
    assert 0 <= metrics.queue_s < times[0] == metrics.first_token_s
    assert times == sorted(times)
    assert metrics.total_s == times[-1]
    assert metrics.per_token_s == pytest.approx((times[-1] - times[0]) / 11)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_token_borders_ends_the_text(llm: LLM, include: bool) -> None:
    free = llm.generate("stop", SamplingParams(**{**GREEDY, "max_tokens": 30}))[0].outputs[0]
    # One token is one byte here, so three characters span tokens.
    stop = free.text[5:8]
    cut = free.text.index(stop)
    answer = llm.generate(
        "stop",
        SamplingParams(
            **{**GREEDY, "max_tokens": 30},
            stop=["never there", stop],
            include_stop_str_in_output=include,
        ),
    )[0].outputs[0]
    assert answer.text == free.text[: cut + len(stop) * include]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.token_ids == free.token_ids[: len(answer.token_ids)]
    assert stop in llm.tokenizer.decode(answer.token_ids)


def test_a_stop_token_ends_the_tokens_but_not_the_text(llm: LLM) -> None:
    free = llm.generate([PROMPT], SamplingParams(**GREEDY))[0].outputs[0]
    token = free.token_ids[4]
    length = free.token_ids.index(token) + 1
    for include in (False, True):
        answer = llm.generate(
            [PROMPT],
            SamplingParams(**GREEDY, stop_token_ids=[token], include_stop_str_in_output=include),
        )[0].outputs[0]
        assert answer.token_ids == free.token_ids[:length]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", token)
        shown = answer.token_ids if include else answer.token_ids[:-1]
        assert answer.text == llm.tokenizer.decode(shown)


def test_min_tokens_puts_off_every_end(llm: LLM) -> None:
    free = llm.generate([PROMPT], SamplingParams(**GREEDY))[0].outputs[0]
    ends: dict[str, Any] = {"stop_token_ids": [free.token_ids[1]], "stop": free.text[:1]}
    answer = llm.generate([PROMPT], SamplingParams(**GREEDY, min_tokens=8, **ends))[0].outputs[0]
    assert len(answer.token_ids) >= 8
    assert free.token_ids[1] not in answer.token_ids[:8]


def test_bad_words_never_come(llm: LLM) -> None:
    encode = llm.tokenizer.encode
    free = llm.generate([PROMPT], SamplingParams(**GREEDY))[0].outputs[0]
    bad = sorted(text for text in {*free.text} if text.isascii() and text.isprintable())
    answer = llm.generate([PROMPT], SamplingParams(**GREEDY, bad_words=bad))[0].outputs[0]
    assert bad
    assert not {token for word in bad for token in encode(word)} & set(answer.token_ids)


def test_smaller_priorities_run_first(llm: LLM) -> None:
    # More than there are slots: those in the last place, but of the smallest number, start first.
    prompts = [[n, *PROMPT] for n in range(24)]
    priority = [0] * 16 + [-1] * 8
    answers = llm.generate(prompts, SamplingParams(**GREEDY), priority=priority)
    queued = [answer.metrics.queue_s for answer in answers]
    assert max(queued[16:]) <= min(queued[:16])


def test_chat_is_the_rendered_template_and_answers_in_order(llm: LLM) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("hello", "bye")]
    answers = llm.chat(chats, SamplingParams(**GREEDY))
    for chat, answer in zip(chats, answers, strict=True):
        rendered = f"user: {chat[0]['content']}\nassistant:"
        assert answer.prompt == rendered
        (same,) = llm.generate(rendered, SamplingParams(**GREEDY))
        assert same.outputs[0].token_ids == answer.outputs[0].token_ids
    (single,) = llm.chat(chats[0], SamplingParams(**GREEDY))
    assert single.outputs[0].token_ids == answers[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hello", "messages must be a list"),
        ([], "messages must be a list"),
        (None, "messages must be a list"),
        ([[]], "messages must be a list"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a text"),
        ([["hello"]], r"messages\[0\] must be an object"),
        (
            [[{"role": "user", "content": "a"}], [{"role": "king", "content": "a"}]],
            r"conversation 1: messages\[0\].role must be one of",
        ),
    ],
)
def test_messages_that_are_none_are_refused(llm: LLM, messages: object, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        llm.chat(messages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logit_bias": {300: 1.0}}, r"logit_bias 300 .* \(0 to 299\)"),
        ({"stop_token_ids": [5, 300]}, r"stop_token_ids 300 .* \(0 to 299\)"),
        ({"logprobs": 41}, "logprobs must be at most 40, the smaller of --max-logprobs"),
        ({"prompt_logprobs": -1}, r"prompt_logprobs must be at most 40, .* not -1 \(the whole"),
    ],
)
def test_what_the_vocabulary_lacks_is_refused(
    llm: LLM, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        llm.generate([PROMPT], SamplingParams(**fields))


def test_priorities_must_match_the_prompts(llm: LLM) -> None:
    with pytest.raises(UsageError, match="2 priorities were given for 1 prompts"):
        llm.generate([PROMPT], priority=[1, 2])
    for wrong in (3, ["high"], "high"):
        with pytest.raises(UsageError, match="priority must be a list of whole numbers"):
            llm.generate([PROMPT], priority=wrong)  # type: ignore[arg-type]
