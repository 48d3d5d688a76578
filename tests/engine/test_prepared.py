"""What parameters come to: counted and bounded before anything runs, sent once, dropped once."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from engine.test_engine import Pipeline, engine
from headrace.engine.engine import Engine
from headrace.engine.prepared import Preparation
from headrace.errors import UsageError
from headrace.protocol import codec
from headrace.protocol.codec import decode_to_rank, encode_plan
from headrace.protocol.plan import Plan, TokenRules, Yield
from headrace.protocol.ranks import Ranks
from headrace.sampling_params import MOST_BAD_WORD_TOKENS, SamplingParams


@dataclass
class CountingTokenizer:
    """Each letter is a token; counts what it is asked."""

    calls: int = 0

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        self.calls += 1
        return SimpleNamespace(ids=[min(ord(letter), 999) for letter in text.strip()])


def preparation(tokenizer: Any) -> Preparation:
    return Preparation(tokenizer, vocab_size=1000, eos_token_ids={7, 2}, max_logprobs=5)


def rules_of(prepared_by: Preparation, **params: Any) -> TokenRules:
    rules = prepared_by.prepare(SamplingParams(**params)).rules
    assert rules is not None
    return rules.numbered(4)


def test_bad_words_may_have_so_many_tokens_in_all() -> None:
    words = [f"{n:04}" for n in range(MOST_BAD_WORD_TOKENS // 4)]
    made = rules_of(preparation(CountingTokenizer()), bad_words=words)
    assert sum(map(len, made.bad_words)) == MOST_BAD_WORD_TOKENS
    with pytest.raises(UsageError, match=rf"^bad_words may have {MOST_BAD_WORD_TOKENS} tokens"):
        preparation(CountingTokenizer()).prepare(SamplingParams(bad_words=[*words, "x"]))


def test_no_more_bad_words_are_tokenized_than_show_that_they_are_too_many() -> None:
    tokenizer = CountingTokenizer()
    with pytest.raises(UsageError, match="bad_words"):
        preparation(tokenizer).prepare(SamplingParams(bad_words=[f"{n:05}" for n in range(26000)]))
    # Twice each: at the beginning of a text and inside one.
    assert tokenizer.calls <= 2 * (MOST_BAD_WORD_TOKENS // 5 + 1)


def test_a_bad_word_without_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^bad_words: ' ' has no token"):
        preparation(CountingTokenizer()).prepare(SamplingParams(bad_words=["x", " "]))


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_ends_are_told_only_if_some_outputs_must_come_first(ignore_eos: bool) -> None:
    made = preparation(CountingTokenizer())
    params: dict[str, Any] = {"ignore_eos": ignore_eos, "stop_token_ids": [8]}
    assert made.prepare(SamplingParams(**params)).rules is None
    assert rules_of(made, min_tokens=2, **params).end_tokens == [2, 7, 8]


def test_what_is_long_is_handed_on() -> None:
    made = rules_of(
        preparation(CountingTokenizer()), bad_words=["ab", "c"], logit_bias={4: 2.0, 5: 1000.0}
    )
    assert made == TokenRules(4, [[97, 98], [99]], {4: 2.0, 5: 100.0}, [])


def toy_engine(pipeline: Pipeline, **config: Any) -> Engine:
    made = engine(pipeline, **config)
    tokenizer = Tokenizer(models.WordLevel({f"t{n}": n for n in range(10)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Engine(made.scheduler, pipeline, tokenizer, 10, made.pace, 0, 60.0, 5)


def run(target: Engine) -> None:
    while not target.scheduler.idle:
        target.step()


def sent(plans: list[Plan]) -> list[TokenRules]:
    return [rules for plan in plans for rules in plan.rules]


def test_a_list_is_sent_once_for_all_completions_of_all_prompts_and_dropped_once() -> None:
    pipeline = Pipeline()
    target = toy_engine(pipeline)
    # More than the slots that there are, so they take turns.
    prepared = target.prepare(SamplingParams(n=6, max_tokens=3, bad_words=["t1 t2", "t4"]))
    for prompt in ([1], [1, 2], [3]):
        target.add(prompt, prepared)
    run(target)
    (rules,) = sent(pipeline.plans)
    assert rules.bad_words == [[1, 2], [4]]
    admitted = [admission for plan in pipeline.plans for admission in plan.admitted]
    assert len(admitted) == 18
    assert {admission.rules for admission in admitted} == {rules.number}
    assert [number for plan in pipeline.plans for number in plan.dropped] == [rules.number]
    assert pipeline.plans[-1].dropped == [rules.number]


def test_a_list_that_comes_again_after_it_was_dropped_is_sent_again_by_another_name() -> None:
    pipeline = Pipeline()
    target = toy_engine(pipeline)
    prepared = target.prepare(SamplingParams(max_tokens=2, logit_bias={3: 1.0}))
    for _ in range(2):
        target.add([1], prepared)
        run(target)
    first, second = sent(pipeline.plans)
    assert first.number != second.number
    assert [n for plan in pipeline.plans for n in plan.dropped] == [first.number, second.number]


def test_a_list_of_requests_that_never_ran_is_never_sent() -> None:
    pipeline = Pipeline()
    target = toy_engine(pipeline)
    request = target.add([1], SamplingParams(n=3, logit_bias={3: 1.0}))
    target.abort(request)
    run(target)
    assert not sent(pipeline.plans)
    assert target.scheduler.idle


def messages(plan: Plan, stages: int) -> Iterator[Plan]:
    for data in encode_plan(plan, Ranks(stages)):
        decoded = decode_to_rank(data)
        assert isinstance(decoded, Plan)
        yield decoded


@given(stages=st.integers(1, 4), words=st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_only_the_last_stage_is_told_how_tokens_are_chosen(stages: int, words: int) -> None:
    def plans(**params: Any) -> list[Plan]:
        pipeline = Pipeline()
        target = toy_engine(pipeline)
        target.add([1], SamplingParams(n=2, max_tokens=2, seed=1, **params))
        run(target)
        return pipeline.plans

    listed = plans(bad_words=["t1" + " t2" * n for n in range(words)], logit_bias={3: 1.0})
    for with_list, without in zip(listed, plans(top_p=0.5), strict=False):
        *others, last = messages(with_list, stages)
        assert last == with_list
        # Not a byte of it, whatever it is.
        for own, plain in zip(others, list(messages(without, stages))[:-1], strict=True):
            assert own == plain


@pytest.mark.parametrize(("stages", "encodings"), [(1, 1), (2, 2), (4, 2)])
def test_a_plan_is_encoded_once_for_the_last_stage_and_once_for_all_others(
    stages: int, encodings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline()
    target = toy_engine(pipeline)
    target.add([1], SamplingParams(max_tokens=1))
    run(target)
    encoded: list[Plan] = []
    encode = codec.encode

    def counted(plan: Plan) -> bytes:
        encoded.append(plan)
        return encode(plan)

    monkeypatch.setattr(codec, "encode", counted)
    assert len(codec.encode_plan(pipeline.plans[0], Ranks(stages))) == stages
    assert len(encoded) == encodings


def test_long_lists_of_many_requests_come_to_the_last_stage_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.engine.plan_draft.MOST_RULES", 5)
    pipeline = Pipeline()
    target = toy_engine(pipeline)
    biases = [dict.fromkeys(range(size), 1.0) for size in (4, 9, 4, 1, 1)]
    for bias in biases:
        target.add([1], SamplingParams(n=2, max_tokens=2, logit_bias=bias))
    target.add([2], SamplingParams(max_tokens=2))
    run(target)
    assert sorted(len(rules.logit_bias) for rules in sent(pipeline.plans)) == [1, 1, 4, 4, 9]
    for plan in pipeline.plans:
        sizes = [len(rules.logit_bias) + len(rules.bad_words) for rules in plan.rules]
        # One byte says that there are no bad words.
        assert len(sizes) <= 1 or sum(sizes) + len(sizes) <= 5
    # Nobody else waits for them, completions that go by the same ones included.
    first = pipeline.plans[0]
    assert [len(first.rules), len(first.admitted)] == [1, 3]


def test_reports_on_prompts_come_in_pieces_and_hold_up_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.engine.plan_draft.MOST_REPORTED", 24)
    pipeline = Pipeline()
    target = toy_engine(pipeline)
    # Six a position, so four positions a step.
    reporting = [
        target.add([1] * 17, SamplingParams(max_tokens=1, prompt_logprobs=5)) for _ in range(2)
    ]
    plain = target.add([2] * 20, SamplingParams(max_tokens=1))
    ended = []
    while not target.scheduler.idle:
        ended += [delta.request_id for delta in target.step() if delta.finish_reason]
    pieces = [
        sum(len(row.inputs) for row in plan.rows if row.yields & Yield.PROMPT_LOGPROBS)
        for plan in pipeline.plans
    ]
    assert max(pieces) * 6 <= 24
    assert ended[0] == plain
    assert sorted(ended[1:]) == reporting


def test_one_position_is_reported_however_many_log_probabilities_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.engine.plan_draft.MOST_REPORTED", 3)
    pipeline = Pipeline()
    target = toy_engine(pipeline)
    target.add([1] * 9, SamplingParams(max_tokens=1, prompt_logprobs=5))
    run(target)
    reported = [row for plan in pipeline.plans for row in plan.rows if row.yields & 2]
    assert {len(row.inputs) for row in reported} == {1}
    assert len(reported) == 8


def test_completions_report_no_more_than_a_step_may() -> None:
    made = Preparation(CountingTokenizer(), 100_000, frozenset(), -1)  # type: ignore[arg-type]
    made.prepare(SamplingParams(logprobs=-1))
    made.prepare(SamplingParams(n=256, logprobs=20))
    with pytest.raises(UsageError, match=r"^logprobs: 100001 for a token of each of 2 completions"):
        made.prepare(SamplingParams(n=2, logprobs=-1))
